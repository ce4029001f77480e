"""Which version of Headway this is, for those of its modules that the package itself imports."""

__version__ = "0.1.0"
