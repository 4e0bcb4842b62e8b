"""A package, so that no other one of this name that is installed takes its place."""
