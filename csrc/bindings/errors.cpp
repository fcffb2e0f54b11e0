#include "bindings/errors.h"

#include <utility>

#include "arch/interrupt.h"
#include "bindings/python.h"
#include "bindings/signals.h"
#include "comm/peer_errors.h"
#include "moe/expert_parallel.h"

namespace moe_a2a::bindings {
namespace {

// Sets an error of moe_a2a/errors.py: classes of Python, so that they can carry attributes. py::arg is forwarded,
// since pybind11 would take an lvalue for a positional argument.
template <class... Attribute>
void set_error(const char* name, const std::string& what, Attribute&&... attributes) {
  // A peer's text may be a mixture of two (see RefusalText), hence not valid UTF-8.
  const auto text = py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(what.data(), std::ssize(what), "replace"));
  if (!text) throw py::error_already_set();
  const py::object type = py::module_::import("moe_a2a.errors").attr(name);
  PyErr_SetObject(type.ptr(), type(text, std::forward<Attribute>(attributes)...).ptr());
}

void raise_peer_errors(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Interrupted& error) {
    if (!restore_signal_error()) PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (const PeerTimeout& error) {
    const Report& r = error.report;
    const int named = r.reason == Reason::kPoisoned ? r.culprit : r.peer;
    set_error("PeerTimeoutError", error.what(), py::arg("operation") = error.operation,
              py::arg("phase") = error.awaited, py::arg("rank") = r.rank, py::arg("peer") = named,
              py::arg("token") = r.token, py::arg("expected_epoch") = r.expected_epoch,
              py::arg("seen_epoch") = r.seen_epoch, py::arg("elapsed_seconds") = r.elapsed_seconds);
  } catch (const BadRouting& error) {
    set_error("RoutingError", error.what());
  } catch (const CallMismatch& error) {
    set_error("CallMismatchError", error.what(), py::arg("peer") = error.peer);
  } catch (const PeerRefused& error) {
    set_error("PeerRefusedError", error.what(), py::arg("peer") = error.peer);
  }
}

}  // namespace

void translate_errors() { py::register_exception_translator(raise_peer_errors); }

}  // namespace moe_a2a::bindings
