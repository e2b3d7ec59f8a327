"""Primal heuristics: from decoded labels or an incumbent to cheaper labels that fit the capacity.

Iterated conditional modes with penalties (Besag 1986), exact moves of whole trees, and integer programs over a part of
the labels: restricted master heuristics of column generation, and large neighbourhood search (Shaw 1998).
"""
