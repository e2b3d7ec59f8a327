"""Orders of pipeline tasks (GPipe, 1F1B, interleaved 1F1B, ZB-H1) and their simulation; it imports no JAX.

In: a schedule's kind and sizes, and how long each task and transfer takes (`StepDurations`). Out: a `Schedule`, the
time and the peak memory of a step, and a `Timeline` of all events as text, HTML or PNG; recorded steps have the same
form.
"""
