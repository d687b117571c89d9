"""Doors into trainers and libraries: one module for each, which needs the package that it is named after."""
