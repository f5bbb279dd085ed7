"""Planning: lengths, groups and settings in, indices out. Pure: no clock, no payload, no state
between calls.
"""
