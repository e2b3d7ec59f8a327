"""Exact search: the remaining problem as a mixed integer program, solved by HiGHS through OR-Tools' MathOpt.

In goes a factor graph with a reparametrisation and the labels that are kept; out comes the best labelling of these and
a proven bound. The program is that of the local polytope (Wainwright, Jaakkola and Willsky 2005; Alpa's, OSDI 2022),
with reduced costs as its objective. OR-Tools is used in this folder only.
"""
