"""Unequal shares of a tensor axis: which units of a layer move between devices, and how many each device takes."""
