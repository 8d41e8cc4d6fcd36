"""Whole swarms in one process under virtual time, with modelled engines."""
