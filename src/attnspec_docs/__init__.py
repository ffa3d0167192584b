"""What builds the documentation, as extensions of Python-Markdown and of Griffe; not part of the package that people install."""
