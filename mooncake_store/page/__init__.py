"""The page of a master, and what it shares with other pages of the project.

`assets` sends files; `server` answers for a master: its figures as they change, keys, events.
"""
