"""The contenders, one per module. `benchmarks.contender` runs them. Each module imports only its own library."""
