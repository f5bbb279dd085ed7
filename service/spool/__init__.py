"""What was accepted, until its step is committed: one file a medium, behind the `Spool` Protocol of
records.py.
"""
