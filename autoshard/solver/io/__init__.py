"""Problems and solutions on disk: problem files, instances of the ASPLOS 2025 contest, solution files, the cache.

What is written is versioned and named by a digest of the problem; what is read is checked before it is believed.
"""
