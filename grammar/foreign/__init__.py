"""The table of other systems' names: what each means there, and what is written here for the same numbers.

One file per system, and `shared.py` for names that mean the same in several. `lookup.py` reads them for messages and
`moec explain`, `pages.py` for the tables of docs/from. Imported only where something is wrong or is asked for.
"""
