#include "bindings/collectives.h"

#include <numeric>

#include "bindings/clients.h"
#include "bindings/tensor_gate.h"
#include "collectives/collectives.h"
#include "comm/fnv1a.h"

namespace moe_a2a::bindings {
namespace {

class Core : public ClientCore {
 public:
  Core(const std::shared_ptr<Communicator>& comm, bool owns_comm, at::Device device, int64_t max_nbytes,
       int64_t symmetric_nbytes, int num_blocks)
      : ClientCore(make_unlocked<Collectives>(comm, max_nbytes, symmetric_nbytes, num_blocks), comm, owns_comm, device),
        place_{comm->member().rank, device, "these Collectives"},
        num_ranks_(comm->member().num_ranks) {}

  at::Tensor all_reduce(const at::Tensor& x, int op, int algorithm, int codec, bool as_words, int num_blocks,
                        const std::optional<at::Tensor>& out) {
    const Prepared call = prepare([&] {
      const DType dtype = checked_x(x);
      if (static_cast<Algorithm>(algorithm) == Algorithm::kDirect) {
        require_symmetric(x, "x");
        require_symmetric(out.value_or(at::Tensor()), "out");
      }
      return Prepared(x, checked_out(out, x.sizes(), x, 0), dtype);
    });
    run([&](Collectives& collectives, void* stream) {
      collectives.all_reduce(
          call.operands, x.numel(),
          {static_cast<ReduceOp>(op), static_cast<Algorithm>(algorithm), static_cast<LineCodec>(codec),
           as_words ? CollectiveWire::kWords : CollectiveWire::kRows, num_blocks},
          stream);
    });
    return call.out;
  }

  at::Tensor reduce_scatter(const at::Tensor& x, int op, const std::optional<std::vector<int64_t>>& counts,
                            int num_blocks, const std::optional<at::Tensor>& out) {
    std::vector<int64_t> shares;
    const Prepared call = prepare([&] {
      const DType dtype = checked_x(x);
      const std::vector<int64_t> rows = counts ? checked_counts(*counts, x.dim() > 0 ? x.size(0) : -1) : even_rows(x);
      shares = in_elements(rows, x);
      const int64_t first = std::accumulate(shares.begin(), shares.begin() + place_.rank, int64_t{0});
      return Prepared(x, checked_out(out, shape_of(x, rows[place_.rank]), x, first), dtype, row_shape_of(x));
    });
    run([&](Collectives& collectives, void* stream) {
      collectives.reduce_scatter(call.operands, shares, static_cast<ReduceOp>(op), num_blocks, stream);
    });
    return call.out;
  }

  at::Tensor all_gather(const at::Tensor& x, const std::optional<std::vector<int64_t>>& counts, int num_blocks,
                        const std::optional<at::Tensor>& out) {
    std::vector<int64_t> shares;
    const Prepared call = prepare([&] {
      const DType dtype = checked_x(x);
      require_rows(x);
      const std::vector<int64_t> rows =
          counts ? checked_counts(*counts, -1) : std::vector<int64_t>(num_ranks_, x.size(0));
      if (rows[place_.rank] != x.size(0)) {
        raise_value(place_.rank,
                    "x has " + std::to_string(x.size(0)) + " rows, counts says " + std::to_string(rows[place_.rank]),
                    "pass counts=[the x.size(0) of every rank]");
      }
      shares = in_elements(rows, x);
      const int64_t first = std::accumulate(shares.begin(), shares.begin() + place_.rank, int64_t{0});
      const int64_t num_rows = std::accumulate(rows.begin(), rows.end(), int64_t{0});
      return Prepared(x, checked_out(out, shape_of(x, num_rows), x, -first), dtype, row_shape_of(x));
    });
    run([&](Collectives& collectives, void* stream) {
      collectives.all_gather(call.operands, shares, num_blocks, stream);
    });
    return call.out;
  }

  void barrier() {
    run([](Collectives& collectives, void* stream) { collectives.barrier(stream); });
  }

  // uint8 [nbytes] in symmetric memory, which it keeps alive, even after close().
  at::Tensor take_tensor(int64_t nbytes) {
    const auto collectives = this->collectives();
    std::byte* data;
    {
      py::gil_scoped_release unlocked;  // another thread's call may hold the gate, and need the GIL to end
      data = collectives->take_tensor(nbytes);
    }
    return at::for_blob(data, {nbytes})
        .deleter([collectives](void*) {})
        .target_device(place_.device)
        .options(at::TensorOptions().dtype(at::kByte).device(place_.device))
        .make_tensor();
  }
  bool holds(const at::Tensor& tensor) const {
    return tensor.has_storage() && tensor.is_contiguous() &&
           collectives()->holds(bytes_of(tensor), static_cast<int64_t>(tensor.nbytes()));
  }

  void refuse(const std::string& why) {
    run([&](Collectives& collectives, void* stream) { collectives.refuse(why, stream); });
  }
  int64_t share_nbytes() const { return collectives()->share_bytes(); }

 private:
  std::shared_ptr<Collectives> collectives() const { return std::static_pointer_cast<Collectives>(open()); }

  struct Prepared {
    Prepared(const at::Tensor& x, const at::Tensor& out, DType dtype, uint64_t row_shape = 0)
        : out(out), operands{bytes_of(x), static_cast<std::byte*>(out.mutable_data_ptr()), dtype, row_shape} {}

    at::Tensor out;
    Collectives::Operands operands;
  };

  // A failure here is reported to the peers, which do make the call.
  template <class Prepare>
  Prepared prepare(const Prepare& prepare) {
    collectives()->require_open();
    try {
      return prepare();
    } catch (const std::exception& error) {
      refuse(error.what());
      throw;
    }
  }
  template <class Call>
  void run(const Call& call) {
    const auto collectives = this->collectives();
    void* stream = current_stream(place_.device);
    py::gil_scoped_release unlocked;
    call(*collectives, stream);
  }

  static const std::byte* bytes_of(const at::Tensor& x) { return static_cast<const std::byte*>(x.const_data_ptr()); }

  void check_dense(const at::Tensor& tensor, const char* name) const {
    check_plain(place_, tensor, name);
    check_contiguous(place_.rank, tensor, name);
    check_no_grad(place_.rank, tensor, name);
  }
  DType checked_x(const at::Tensor& x) const {
    check_dense(x, "x");
    if (x.scalar_type() == at::kFloat) return DType::kFloat32;
    if (x.scalar_type() == at::kHalf) return DType::kFloat16;
    if (x.scalar_type() == at::kBFloat16) return DType::kBfloat16;
    raise_type(place_.rank, "x has dtype " + text_of(x.scalar_type()),
               "expected float32, float16 or bfloat16; pass x.to(torch.float32)");
  }

  void require_symmetric(const at::Tensor& tensor, const char* name) const {
    if (tensor.defined() && (holds(tensor) || tensor.numel() == 0)) return;
    raise_value(place_.rank, std::string(name) + " does not lie in symmetric memory, which algorithm=\"direct\" needs",
                "pass x and out made by empty(), or another algorithm");
  }
  void require_rows(const at::Tensor& x) const {
    if (x.dim() == 0) raise_value(place_.rank, "x has no dimension to split over the ranks", "pass x.reshape(1)");
  }
  std::vector<int64_t> even_rows(const at::Tensor& x) const {
    require_rows(x);
    if (x.size(0) % num_ranks_ != 0) {
      raise_value(place_.rank,
                  "x has " + std::to_string(x.size(0)) + " rows, which " + std::to_string(num_ranks_) +
                      " ranks cannot split evenly",
                  "pass counts=[rows of every rank]");
    }
    return std::vector<int64_t>(num_ranks_, x.size(0) / num_ranks_);
  }
  // `num_rows`: their sum, unless negative.
  std::vector<int64_t> checked_counts(const std::vector<int64_t>& counts, int64_t num_rows) const {
    if (counts.size() != static_cast<size_t>(num_ranks_)) {
      raise_value(
          place_.rank,
          "counts has " + std::to_string(counts.size()) + " numbers for " + std::to_string(num_ranks_) + " ranks",
          "pass one per rank");
    }
    const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    if (num_rows >= 0 && sum != num_rows) {
      raise_value(place_.rank,
                  "counts has the sum " + std::to_string(sum) + ", x has " + std::to_string(num_rows) + " rows",
                  "pass counts that add up to x.size(0)");
    }
    return counts;
  }
  static std::vector<int64_t> in_elements(std::vector<int64_t> rows, const at::Tensor& x) {
    int64_t row = 1;
    for (int64_t d = 1; d < x.dim(); ++d) row *= x.size(d);
    for (int64_t& count : rows) count *= row;
    return rows;
  }
  static uint64_t row_shape_of(const at::Tensor& x) {
    Fnv1a hash;
    for (int64_t d = 1; d < x.dim(); ++d) hash.add(static_cast<uint64_t>(x.size(d)));
    return hash.digest;
  }
  static std::vector<int64_t> shape_of(const at::Tensor& x, int64_t num_rows) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape[0] = num_rows;
    return shape;
  }

  // `out`, or a new tensor of the dtype of x. It may overlap x only where it begins with element `first` of x.
  at::Tensor checked_out(const std::optional<at::Tensor>& out, at::IntArrayRef shape, const at::Tensor& x,
                         int64_t first) const {
    if (!out) return make_tensor(place_, shape, x.scalar_type());
    check_dense(*out, "out");
    if (out->sizes() != shape || out->scalar_type() != x.scalar_type()) {
      raise_value(place_.rank,
                  "out is " + text_of(out->sizes()) + " of " + text_of(out->scalar_type()) + ", expected " +
                      text_of(shape) + " of " + text_of(x.scalar_type()),
                  "pass a tensor of that shape and dtype");
    }
    if (overlap(*out, x) &&
        static_cast<const std::byte*>(out->const_data_ptr()) != bytes_of(x) + first * x.element_size()) {
      raise_value(place_.rank, "out overlaps x", "pass this rank's own part of the longer tensor, or separate memory");
    }
    count_write(*out);
    return *out;
  }

  Place place_;
  int num_ranks_;
};

}  // namespace

void bind_collectives(py::module_& m) {
  py::class_<Core, ClientCore>(m, "Collectives")
      .def(py::init([](const CommunicatorCore& comm, bool owns_comm, const at::Device& device, int64_t max_nbytes,
                       int64_t symmetric_nbytes, int num_blocks) {
        return std::make_unique<Core>(comm.communicator(), owns_comm, device, max_nbytes, symmetric_nbytes, num_blocks);
      }))
      .def("all_reduce", &Core::all_reduce)
      .def("reduce_scatter", &Core::reduce_scatter)
      .def("all_gather", &Core::all_gather)
      .def("barrier", &Core::barrier)
      .def("take_tensor", &Core::take_tensor)
      .def("holds", &Core::holds)
      .def("refuse", &Core::refuse)
      .def_property_readonly("share_nbytes", &Core::share_nbytes);
}

}  // namespace moe_a2a::bindings
