// All families for vectors of one width; compiled once for each.
#include "features.h"
#include "hybrid.h"
#include "lsh.h"
#include "tiles.h"

namespace fast_attention {

extern const Kernels FAST_ATTENTION_JOIN(kernels_of_width_, FAST_ATTENTION_WIDTH);
const Kernels FAST_ATTENTION_JOIN(kernels_of_width_, FAST_ATTENTION_WIDTH) = {
    FAST_ATTENTION_WIDTH,
    FAST_ATTENTION_NAMESPACE::tiles_forward,
    FAST_ATTENTION_NAMESPACE::tiles_backward,
    FAST_ATTENTION_NAMESPACE::features_forward,
    FAST_ATTENTION_NAMESPACE::features_backward,
    FAST_ATTENTION_NAMESPACE::hybrid_forward,
    FAST_ATTENTION_NAMESPACE::hybrid_backward,
    FAST_ATTENTION_NAMESPACE::lsh_hash,
    FAST_ATTENTION_NAMESPACE::lsh_forward,
    FAST_ATTENTION_NAMESPACE::lsh_backward,
};

}  // namespace fast_attention
