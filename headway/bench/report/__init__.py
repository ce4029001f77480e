"""What people look at: the terminal, figures, the HTML report."""
