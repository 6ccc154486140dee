"""Data: which samples make a step, how each kind of data set is read, and in which process."""
