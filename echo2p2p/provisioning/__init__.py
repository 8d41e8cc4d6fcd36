"""How many workers a run needs, and which. Pure: no I/O, no clock."""
