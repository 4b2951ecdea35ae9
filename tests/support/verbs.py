"""Verbs with which the docstring of a function begins."""

import re

_VERBS = """
Accept Act Add Advance Align Allow Answer Append Apply Ask Assemble Assert Backtrack Balance Begin
Bind Bisect Block Bound Bracket Broadcast Build Cache Call Carry Cast Caution Chain Check Choose
Classify Clip Close Collect Combine Compare Compile Complete Compute Connect Convert Copy Correct
Count Create Cross Cut Damp Decide Declare Decode Defer Define Delete Derive Describe Detach Detect
Differentiate Disable Divide Document Download Drain Draw Drive Drop Encode End Enlarge Ensure Enter
Erase Escape Estimate Evaluate Exchange Exclude Execute Exit Expand Explain Extract Extrapolate
Factor Factorize Fetch Fill Find Finish Fit Flatten Fold Follow Forget Form Format Freeze Fuse
Gather Generate Get Give Group Guard Handle Hash Hide Hold Import Include Index Infer Initialize
Insert Integrate Interpret Invert Iterate Join Judge Keep Label Launch Lay Learn Leave Let Limit
Linearize Link List Load Lock Log Look Make Map Mark Mask Match Measure Merge Mix Move Multiply Name
Normalize Note Notice Observe Open Order Orthogonalize Pack Pad Parametrize Parse Pass Permute Pick
Place Plan Plot Predict Preload Prepare Present Print Process Project Propagate Provide Pull Push
Put Quantize Quote Raise Rank Rate Read Rebuild Recompute Record Recover Reduce Refill Refuse
Register Regularize Reject Relabel Release Remove Rename Render Reorder Repeat Replace Replay Report
Represent Reproduce Require Resample Rescale Reset Reshape Resolve Restart Restore Return Reuse
Reverse Rewrite Rotate Round Route Run Sample Save Say Scale Scan Score Search Seed Select Send
Serve Set Settle Share Shift Show Shuffle Sign Simulate Size Sketch Skip Smooth Solve Sort Spawn
Split Spread Stack Standardize Start Step Stop Store Stream Study Substitute Subtract Sum Summarize
Swap Switch Take Tell Terminate Test Throw Tie Time Trace Track Train Transform Translate Transpose
Trim Try Unfold Unpack Unroll Unscale Update Upload Use Validate Vectorize Verify View Visit Wait
Walk Warm Warn Watch Weigh Wrap Write Yield Zero
"""

VERBS = frozenset(_VERBS.split())
"""Add a verb where it is missing."""

_NOUNS_TOO = """
Bound Cut Factor Fit Form Group Hash Index Label Log Map Mask Measure Name Note Order Plan Plot
Rank Rate Record Report Sample Scale Scan Score Seed Share Sign Size Sketch Split Stack Start
Step Stop Sum Test Time Trace Train Update Watch
"""

NOUNS_TOO = frozenset(_NOUNS_TOO.split())
"""Verbs that are nouns before "of", a comma or a colon."""


def begins_with_verb(line):
    word = line.split()[0].rstrip(",.:;")
    if word in NOUNS_TOO and re.match(r"\w+( of|,| at\b| in\b| for\b|:)", line):
        return False
    return word in VERBS


def is_predicate(line):
    """Whether a line says what its subject does, as "Collects ..." or "Collect ..."."""
    word = line.split()[0].rstrip(",.:;")
    stems = {word, word[:-1], word[:-2]} if word.endswith("s") else {word}
    return (
        bool(stems & (VERBS - NOUNS_TOO - {"End", "Link", "Step", "Transform"}))
        and word not in PLURALS
    )


_PLURALS = """
Links Measures Names Records Samples Scores Sizes Starts Sums Updates
"""

PLURALS = frozenset(_PLURALS.split())
