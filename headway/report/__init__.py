"""How results are shown: pages, tables and pictures that read in light, in dark, on paper and in a terminal."""
