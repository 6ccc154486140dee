"""Who takes part now, and who comes next.

roll          what is known of hosts and processes, and what it asks of a host (pure)
membership    what is decided when they are lost, come and settle (pure)
member        a process's own side of it: the succession of worlds, through its supervisor
"""
