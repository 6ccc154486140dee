"""Looks at a run after the fact: how it ended, who was lost and why, and whether every step and
every sample counted exactly once.

Shares no code with what trains: it reads the files of a run by their description, docs/records.md.
"""
