"""The contenders, one module each; `benchmarks.contender` runs them. Each imports its own library and no other's."""
