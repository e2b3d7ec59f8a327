"""Training steps in styles other than the zoo's: what a user may bring, for benchmarks that must not know them."""
