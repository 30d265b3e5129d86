"""The ten figures as one self-contained HTML file: data from the ledger, drawn in the browser.

    figures  models, plans and formulas as JSON data        record  reading a `cedar compare` record
    page     the file: data, text, style and scripts in one static/ style, text (en, zh), ES modules

No number is made here: the page evaluates the planner's own formulas. Imports no torch. Callers:
`cedar page`, and the server, which mounts the same document.
"""
