"""Why the engine waits: one sentence per wait, passed to `stream.wait`, `Task.wait` and `Timeline.waiting_for_eps`.

Logs and traces show the sentence. Tests leave out one wait at a time, by its constant, to show that it is needed.
"""

from __future__ import annotations

# ---- weights of a layer

WEIGHTS_UPLOADED = "a layer computes after its weights have been uploaded"
WEIGHTS_MEMORY_FREE = "weights are uploaded after their device memory has become free"
WEIGHT_SLOT_FREE = "a weight slot is refilled after the layer in it has computed"
MASTERS_READ = "masters may be written after the uploads from them have finished"
COPIES_READ = "memory of 16-bit copies is reused after the copies in it have been uploaded"

# ---- gradients

GRADIENTS_COMPUTED = "gradients are downloaded after they have been computed"
GRADIENT_SLOT_FREE = "gradients are accumulated in a slot after those in it have been downloaded"
NORMS_COMPUTED = "norms of resident gradients that have changed are read after they have been computed"
UBATCH_NORMS_COMPUTED = "norms of the gradients of micro-batches are read after they have been computed"
RECOMPUTE_COMPARED = "comparisons of the recompute with the forward are read after they have been computed"
NORMS_DOWNLOADED = "backward returns after the norms of all gradients have been downloaded"
FAILED_DOWNLOADS_FINISHED = "memory of a failed backward is reused after its downloads have finished"
GRADIENTS_ADDED = "sums of the gradients of all ranks are downloaded after they have been added on the device"
GRADIENT_DOWNLOADED = "a gradient is read after it has been downloaded"

# ---- the stash

INPUT_COMPUTED = "a layer's input is downloaded to the stash after it has been computed"
INPUT_STASHED = "a layer ends after its input has been downloaded to the stash"
OUTPUT_COMPUTED = "a layer's output is downloaded after it has been computed"
COLLECTED_DOWNLOADED = "what a hook has copied to the host is put together after it has been downloaded"
OUTPUT_DOWNLOADED = "memory of a layer's output is reused after it has been downloaded"
ROWS_DOWNLOADED = "rows are uploaded after they have been downloaded"
ROWS_UPLOADED = "rows are recomputed after they have been uploaded from the stash"
ROWS_ARRIVED = "rows that another device sends are computed with after they have arrived"
GIVEN_COMPUTED = "what the model gives to a layer is read by its device after it has been computed"
ROWS_MEMORY_FREE = "rows are uploaded from the stash after their device memory has become free"
LAYERS_COMPUTED = "device memory of a model that is detached is freed after its layers have been computed"
STASH_COPIES_FINISHED = "stash memory is released after all copies from and to it have finished"

# ---- updates

LAYER_GRADIENTS_DOWNLOADED = "a layer is updated after its gradients have been downloaded"
WEIGHTS_UPDATED = "weights are used after their update has finished"
ALL_UPDATES_FINISHED = "optimizer state is used after all updates have finished"
ALL_LAYERS_UPDATED = "a step ends after all layers have been updated"

# ---- the probe of the hardware

PROBE_FILLED = "memory is copied to and from lanes after it has been filled"
PROBE_COPIED = "a copy is timed until it has finished"
