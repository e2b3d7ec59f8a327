"""One page about a plan, a comparison, a verification or a run, that needs no network: `autoshard report`.

What is shown is read from plans and files and turned into plain data (`*_view.py`, `module_tree.py`); pages are put
together from it (`page.py`) with figures of Bokeh, whose script is in the page.
"""
