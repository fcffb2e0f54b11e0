// The wire of medium and large batches: whole rows by bulk copies (TMA where available), each followed by its signal.
// The signals of a block share fences.
#pragma once

#include "arch/shared_plan.h"
#include "comm/signal_queue.h"
#include "comm/work_queue.h"
#include "rows/wire.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Rows that a group forms directly in the first destination's memory; same interface as PlainRowSender.
template <class Group, class SlotAt, class Done>
class InPlaceSender {
 public:
  MOE_A2A_DEVICE InPlaceSender(const Group& group, const SlotAt& slot_at, const Done& done)
      : group_(group), slot_at_(slot_at), done_(done) {}

  MOE_A2A_DEVICE std::byte* open_stage(const Delivery& delivery) const {
    return slot_at_(delivery, delivery.first_dst_rank);
  }
  MOE_A2A_DEVICE void send_staged(const RowSource&, const Delivery& delivery) const {
    group_.release_sync();
    if (group_.rank() == 0) done_(delivery);
  }
  MOE_A2A_DEVICE void finish() const {}

 private:
  const Group& group_;
  const SlotAt& slot_at_;
  const Done& done_;
};

// What a sending warp gets: its stage, where rows go, and what to call when a row has been written.
template <class SlotAt, class Done>
struct RowPort {
  const Warp& warp;
  const SlotAt& slot_at;  // (delivery, rank): the row's slot in that rank's heap
  const Done& done;       // (delivery): called by one lane once the row's stores are ordered before its next signal
  std::byte* stage;       // null: none
};

class RowWire {
 public:
  static constexpr bool kIsLl = false;
  using Queue = SignalQueue<Delivery>;

  // The queue of rows to signal, and a stage per sending warp.
  struct Plan {
    SharedPart<std::byte> queue, stages;
    int stage_bytes = 0;   // 0: rows go by plain stores
    int num_stages = 0;    // warps that may send
    int copied_bytes = 0;  // of a row, if warps only start bulk copies of rows as they are
    int bytes = 0;

    // Warps of each of `num_blocks` blocks that send: all that may, but for bulk copies alone no more than fill the
    // links.
    MOE_A2A_HOST_DEVICE int num_senders(int num_blocks) const {
      return copied_bytes == 0 ? num_stages : num_copying_warps(num_blocks, copied_bytes, num_stages);
    }
  };
  MOE_A2A_HOST_DEVICE static Plan plan(const RowLayout& layout, StagedFor what, int max_shared_bytes,
                                       int num_warps = kBlockWarps) {
    const int64_t wanted =
        what == StagedFor::kStreaming ? kReaderBytes + kPieceSenderBytes : warp_staging_bytes(layout.num_bytes(), what);
    Plan plan = RowWire::plan(wanted, max_shared_bytes, num_warps);
    const bool copies = what == StagedFor::kSending && plan.stage_bytes > 0;
    plan.copied_bytes = copies ? static_cast<int>(layout.num_bytes()) : 0;
    return plan;
  }
  // If the stage does not fit, rows are sent without one.
  MOE_A2A_HOST_DEVICE static Plan plan(int64_t wanted, int max_shared_bytes, int num_warps = kBlockWarps) {
    SharedCarver carver;
    Plan plan;
    plan.queue = carver.take_lines(Queue::shared_bytes());
    const int left = max_shared_bytes - carver.bytes();
    plan.stage_bytes = wanted <= left ? static_cast<int>(wanted) : 0;
    plan.num_stages = Queue::num_senders(warps_with_stage(plan.stage_bytes, left, num_warps), num_warps);
    plan.stages = carver.take_lines(plan.stage_bytes * plan.num_stages);
    plan.bytes = carver.bytes();
    return plan;
  }

  // The longest row for which a warp has a stage to quantise in.
  static int64_t max_quantized_row_bytes(int max_shared_bytes) {
    const auto fits = [&](int64_t row_bytes) {
      return plan(warp_staging_bytes(row_bytes, StagedFor::kQuantizing), max_shared_bytes).stage_bytes > 0;
    };
    int64_t most = 0;
    for (int64_t step = int64_t{1} << 30; step > 0; step /= 2) {
      if (fits(most + step)) most += step;
    }
    return most;
  }

  // ---- sending

  // `ticket`: the counter of the launch's work queue.
  MOE_A2A_DEVICE RowWire(const Exchange& exchange, const RowLayout& layout, const Grid& grid, const Block& block,
                         std::byte* shared, const Plan& plan, uint32_t* ticket)
      : exchange_(exchange),
        layout_(layout),
        grid_(grid),
        block_(block),
        shared_(shared),
        plan_(plan),
        ticket_(ticket) {}

  // What send() begins with if it has nothing to wait for.
  MOE_A2A_DEVICE static bool begin(const Block& block) {
    if (Queue::kNeedsBarrier) block.sync();
    return true;
  }
  // One warp per row; each free warp takes the next row.
  template <class Schedule, class Source>
  MOE_A2A_DEVICE void send(const Schedule& schedule, const Source& source) const {
    send(schedule, source, [&] { return begin(block_); });
  }
  // The same. `begin`: a barrier, which all threads of the block call once it is set up; false: nothing is sent.
  template <class Schedule, class Source, class Begin>
  MOE_A2A_DEVICE bool send(const Schedule& schedule, const Source& source, const Begin& begin) const {
    const int num_senders = plan_.num_senders(grid_.size());
    Queue queue(block_, plan_.queue.in(shared_), num_senders);
    if (!begin()) return false;
    const auto signal_row = [&](const Delivery& delivery) { signal(exchange_, delivery, payload(source, delivery)); };
    if (queue.is_publisher()) queue.publish(signal_row);
    if (!queue.is_sender()) return true;
    const Warp warp = block_.warp();
    const auto slot_of = [&](const Delivery& delivery, int rank) { return slot_at(exchange_, delivery, rank); };
    const auto done = [&](const Delivery& delivery) { queue.push(delivery, signal_row); };
    std::byte* stage =
        plan_.stage_bytes > 0 ? plan_.stages.in(shared_) + block_.warp_rank() * plan_.stage_bytes : nullptr;
    source.with_row_sender(RowPort<decltype(slot_of), decltype(done)>{warp, slot_of, done, stage}, [&](auto& sender) {
      WorkQueue units(grid_, block_, num_senders, ticket_, blocks_join_late<Schedule>());
      units.walk(num_units(schedule), [&](int unit) {
        visit(schedule, warp, unit,
              [&](const Scheduled& scheduled) { send_row<Schedule>(warp, source, sender, scheduled); });
      });
      sender.finish();
    });
    queue.close();
    return true;
  }

  // One block per row, for sums of so few rows that most warps would have none. Each is formed in place and signalled
  // by the whole block.
  template <class Schedule, class Source>
  MOE_A2A_DEVICE void send_by_blocks(const Schedule& schedule, const Source& source) const {
    const auto slot_of = [&](const Delivery& delivery, int rank) { return slot_at(exchange_, delivery, rank); };
    const auto done = [&](const Delivery& delivery) { signal(exchange_, delivery, payload(source, delivery)); };
    InPlaceSender sender(block_, slot_of, done);
    make_round_robin(grid_, 0, 1).walk(schedule.num_rows(), [&](int i) {
      send_row<Schedule>(block_, source, sender, schedule.at(Warp{}, i));
      return true;
    });
  }

  // ---- receiving

  // Waits until the row of site.token from site.peer has landed; false if it gave up. `payload`: of its signal.
  MOE_A2A_DEVICE static bool receive(const Exchange& exchange, const WaitSite& site, const Refusal& refusal = {},
                                     uint32_t* payload = nullptr) {
    return wait_for(exchange.signals.at(exchange.buffer, site.peer, site.token), exchange.epoch, site, exchange.wait,
                    exchange.heap, payload, refusal);
  }

 private:
  template <class Schedule>
  MOE_A2A_DEVICE static constexpr bool blocks_join_late() {
    return requires { requires Schedule::kBlocksJoinLate; };
  }
  // A schedule has a row per unit, at(), or calls back for each row of a unit, visit().
  template <class Schedule>
  MOE_A2A_DEVICE static int num_units(const Schedule& schedule) {
    if constexpr (requires { schedule.num_units(); }) {
      return schedule.num_units();
    } else {
      return schedule.num_rows();
    }
  }
  template <class Schedule, class Send>
  MOE_A2A_DEVICE static void visit(const Schedule& schedule, const Warp& warp, int unit, const Send& send) {
    if constexpr (requires { schedule.visit(warp, unit, send); }) {
      schedule.visit(warp, unit, send);
    } else {
      send(schedule.at(warp, unit));
    }
  }

  template <class Schedule, class Group, class Source, class Sender>
  MOE_A2A_DEVICE void send_row(const Group& group, const Source& source, Sender& sender,
                               const Scheduled& scheduled) const {
    const Delivery& delivery = scheduled.delivery;
    if (delivery.dst_ranks.empty()) return;
    const uint64_t start = trace_now();
    source.send(group, sender, scheduled, layout_.whole());
    record(exchange_.trace(), Warp{},
           {.kind = Source::kKind,
            .begin = start,
            .peer = Schedule::kIsToOneRank ? delivery.first_dst_rank : -1,
            .token = delivery.token});
  }

  MOE_A2A_DEVICE static std::byte* slot_at(const Exchange& exchange, const Delivery& delivery, int rank) {
    const HeapView& heap = exchange.heap;
    return heap.peer(rank, exchange.rows.at(exchange.buffer, heap.rank, delivery.token));
  }
  // The payload of a row's signal.
  template <class Source>
  MOE_A2A_DEVICE static uint32_t payload(const Source& source, const Delivery& delivery) {
    if constexpr (requires { source.payload(delivery); }) {
      return source.payload(delivery);
    } else {
      return 0;
    }
  }
  // Pairs with the acquire in receive().
  MOE_A2A_DEVICE static void signal(const Exchange& exchange, const Delivery& delivery, uint32_t payload) {
    const HeapView& heap = exchange.heap;
    signal_token(heap, delivery.dst_ranks, exchange.signals.at(exchange.buffer, heap.rank, delivery.token),
                 exchange.epoch, payload, exchange.trace(), delivery.token);
  }

  const Exchange& exchange_;
  const RowLayout layout_;
  const Grid& grid_;
  const Block& block_;
  std::byte* shared_;
  const Plan& plan_;
  uint32_t* ticket_;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
