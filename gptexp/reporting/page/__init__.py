"""The report as files, as a page and on the terminal."""
