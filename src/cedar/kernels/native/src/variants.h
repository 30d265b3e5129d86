// The kernels as exported entry points call them: each in the variant in use. For files compiled once.
#pragma once

#include "cedar_native.h"
#include "codec.h"
#include "glue.h"
#include "index_topk.h"
#include "linear.h"
#include "moe.h"
#include "project.h"
#include "sparse_attention.h"

CEDAR_VARIANTS(int, rms_norm, (const cedar::NormCall& call))
CEDAR_VARIANTS(int, rotate, (const cedar::RotateCall& call))
CEDAR_VARIANTS(int, hc_mixes, (const cedar::MixesCall& call))
CEDAR_VARIANTS(int, hc_collapse, (const cedar::CollapseCall& call))
CEDAR_VARIANTS(int, hc_expand, (const cedar::ExpandCall& call))
CEDAR_VARIANTS(int, pool_groups, (const cedar::PoolCall& call))
CEDAR_VARIANTS(int, store_rows, (const cedar::RowsCall& call))
CEDAR_VARIANTS_AMX(int, linear, (const cedar::LinearCall& call))
CEDAR_VARIANTS_AMX(int, moe, (const cedar::MoeCall& call))
CEDAR_VARIANTS_AMX(int, route, (const cedar::RouteCall& call))
CEDAR_VARIANTS_AMX(int, project,
                   (const cedar::ProjectCall& call, int (*norm)(const cedar::NormCall&),
                    int (*turn)(const cedar::RotateCall&)))
CEDAR_VARIANTS_AMX(int, project_output,
                   (const cedar::OutputCall& call, int (*turn)(const cedar::RotateCall&)))
CEDAR_VARIANTS_AMX(int, index_topk, (const cedar::IndexTopkCall& call))
CEDAR_VARIANTS_AMX(int, sparse_attention, (const cedar::SparseAttentionCall& call))

namespace cedar {

// Return values of entry points. Keep in step with `_STATUS` in library.py.
namespace status {
constexpr int kBadWidth = 1, kOutOfRange = 2, kBadKind = 3;
}

inline bool is_activation(int32_t dtype) { return dtype == 0 || dtype == 1; }

namespace run {

inline int rms_norm(const NormCall& call) { CEDAR_CALL(rms_norm, (call)); }
inline int rotate(const RotateCall& call) { CEDAR_CALL(rotate, (call)); }
inline int hc_mixes(const MixesCall& call) { CEDAR_CALL(hc_mixes, (call)); }
inline int hc_collapse(const CollapseCall& call) { CEDAR_CALL(hc_collapse, (call)); }
inline int hc_expand(const ExpandCall& call) { CEDAR_CALL(hc_expand, (call)); }
inline int pool_groups(const PoolCall& call) { CEDAR_CALL(pool_groups, (call)); }
inline int store_rows(const RowsCall& call) { CEDAR_CALL(store_rows, (call)); }
inline int linear(const LinearCall& call) { CEDAR_CALL_AMX(linear, (call)); }
inline int moe(const MoeCall& call) { CEDAR_CALL_AMX(moe, (call)); }
inline int route(const RouteCall& call) { CEDAR_CALL_AMX(route, (call)); }
// Norm and rotation have no variant for matrix tiles: projections are handed the one in use.
inline int project(const ProjectCall& call) { CEDAR_CALL_AMX(project, (call, rms_norm, rotate)); }
inline int project_output(const OutputCall& call) {
  CEDAR_CALL_AMX(project_output, (call, rotate));
}
inline int index_topk(const IndexTopkCall& call) { CEDAR_CALL_AMX(index_topk, (call)); }
inline int sparse_attention(const SparseAttentionCall& call) {
  CEDAR_CALL_AMX(sparse_attention, (call));
}

}  // namespace run
}  // namespace cedar
