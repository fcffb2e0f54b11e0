// The fields of Perfetto's messages that we write. Numbers from protos/perfetto/trace/ of google/perfetto: trace.proto,
// trace_packet.proto, interned_data.proto, track_event/{track_event,track_descriptor,counter_descriptor,
// debug_annotation}.proto.
#pragma once

#include <protozero/types.hpp>

namespace moe_a2a::trace_export {

using Field = protozero::pbf_tag_type;

namespace trace_field {
inline constexpr Field kPacket = 1;
}
namespace packet_field {
inline constexpr Field kTimestamp = 8, kSequenceId = 10, kTrackEvent = 11, kInternedData = 12, kSequenceFlags = 13,
                       kTrackDescriptor = 60;
inline constexpr int kIncrementalStateCleared = 1, kNeedsIncrementalState = 2;  // of kSequenceFlags
}  // namespace packet_field
namespace interned_field {
inline constexpr Field kEventNames = 2, kDebugAnnotationNames = 3;
inline constexpr Field kIid = 1, kName = 2;  // of each entry
}  // namespace interned_field
namespace track_field {
inline constexpr Field kUuid = 1, kName = 2, kParentUuid = 5, kCounter = 8, kChildOrdering = 11, kSiblingOrderRank = 12;
inline constexpr int kExplicit = 3;  // of kChildOrdering
inline constexpr Field kCounterUnit = 3;
inline constexpr int kUnitCount = 2, kUnitBytes = 3;  // of kCounterUnit
}  // namespace track_field
namespace event_field {
inline constexpr Field kDebugAnnotations = 4, kType = 9, kNameIid = 10, kTrackUuid = 11, kName = 23, kCounterValue = 30,
                       kFlowIds = 47, kTerminatingFlowIds = 48;
inline constexpr int kSliceBegin = 1, kSliceEnd = 2, kInstant = 3, kCounter = 4;  // of kType
}  // namespace event_field
namespace annotation_field {
inline constexpr Field kNameIid = 1, kBool = 2, kInt = 4, kDouble = 5, kString = 6, kName = 10, kDictEntries = 11,
                       kArrayValues = 12;
}

}  // namespace moe_a2a::trace_export
