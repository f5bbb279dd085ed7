"""Looking at what a service wrote down, from beside it: reads only, and never speaks to it.

written.py plans out of the spool's database · figures.py what a plan amounts to · terminal.py and
picture.py draw it · cli.py the commands.
"""
