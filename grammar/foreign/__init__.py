"""The table of other systems' names, with moec's words that give the same numbers.

One file per system, and `shared.py` for names with one meaning in several systems. `lookup.py` reads them for messages
and `moec explain`, `pages.py` for the tables of docs/from. Imported only for errors, explanations and pages.
"""
