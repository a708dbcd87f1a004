"""Jobs that are drawn: what breaks, when, on which layout, under which MPI, with which output, surroundings and company.

    plan         what a job can be, as tables, and which of these go together; pure
    draw         plans from a seed, so that every fault comes first and every pair of values soon; pure
    expectation  what the promises of docs/promises.md say of a plan; pure
    laws         what is asked of every job, one function each; pure
    known        which laws are known to be broken by which plans, and why
    outcome      what is seen of a job
    program      what each rank runs
    setting      what stands before the launcher: ignored signals, a terminal, a folder that is gone
    perform      does what a plan says, and watches

To add a fault, add a row to plan.FAULTS and its deed: to program.DEEDS if the rank does it to itself, to perform.DEEDS
if it comes from outside. To add a law, add a function to laws.LAWS and a violation to tests/faults/test_laws.py. To add
a surrounding, add a row to plan.SURROUNDINGS and what makes it to setting.SETTINGS.
"""
