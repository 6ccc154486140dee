"""Who takes part now, and who comes next.

membership    what is decided when processes die, come and settle (pure)
member        a process's own side of it: the succession of worlds, through its supervisor
"""
