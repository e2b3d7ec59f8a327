"""Functions as people call them - with modules, keywords and constants - as pure functions of positional pytrees."""
