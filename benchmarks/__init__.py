"""What is measured, against whom; see README.md beside this file. Not part of the installed package."""
