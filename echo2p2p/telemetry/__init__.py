"""What happened in a run, while it happens and afterwards.

Every role writes one event log. The live view, the summary and the report all read those events and nothing
else, so what they show can be checked against the file by hand. This room stands beside the layers: it
imports no role, and no role's behaviour depends on it.
"""
