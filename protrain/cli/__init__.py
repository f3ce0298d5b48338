"""The command line: train, plan, bench and doctor.

`main` holds the commands and the exit codes, `words` the options they share, `model` how a model comes to be, `train` the
loop, `display` what a person sees of it, `export` the folder that is saved. Nothing here imports torch before it is needed,
so that help and wrong words are answered at once.
"""
