"""Jobs that others ran: readers for public traces, and a generator in their likeness."""
