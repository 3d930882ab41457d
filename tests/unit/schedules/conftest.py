"""Puts the folder with `schedule_cases` and `sharded_cases` on the import path of the folders below."""
