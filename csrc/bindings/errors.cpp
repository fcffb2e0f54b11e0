#include "bindings/errors.h"

#include "arch/interrupt.h"
#include "bindings/python.h"
#include "bindings/signals.h"
#include "comm/peer_errors.h"
#include "moe/expert_parallel.h"

namespace moe_a2a::bindings {
namespace {

// A peer's text may be a mixture of two (see RefusalText), hence not valid UTF-8.
py::str to_python(const std::string& text) {
  PyObject* decoded = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

// PeerTimeoutError and PeerRefusedError are Python classes (moe_a2a/errors.py), so that they can carry attributes.
void raise_peer_errors(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Interrupted& error) {
    if (!restore_signal_error()) PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (const PeerTimeout& error) {
    const Report& r = error.report;
    const int named = r.reason == Reason::kPoisoned ? r.culprit : r.peer;
    py::object type = py::module_::import("moe_a2a.errors").attr("PeerTimeoutError");
    py::object value = type(to_python(error.what()), py::arg("operation") = error.operation,
                            py::arg("phase") = error.awaited, py::arg("rank") = r.rank, py::arg("peer") = named,
                            py::arg("token") = r.token, py::arg("expected_epoch") = r.expected_epoch,
                            py::arg("seen_epoch") = r.seen_epoch, py::arg("elapsed_seconds") = r.elapsed_seconds);
    PyErr_SetObject(type.ptr(), value.ptr());
  } catch (const BadRouting& error) {
    py::object type = py::module_::import("moe_a2a.errors").attr("RoutingError");
    PyErr_SetObject(type.ptr(), type(to_python(error.what())).ptr());
  } catch (const CallMismatch& error) {
    py::object type = py::module_::import("moe_a2a.errors").attr("CallMismatchError");
    PyErr_SetObject(type.ptr(), type(to_python(error.what()), py::arg("peer") = error.peer).ptr());
  } catch (const PeerRefused& error) {
    py::object type = py::module_::import("moe_a2a.errors").attr("PeerRefusedError");
    py::object value = type(to_python(error.what()), py::arg("peer") = error.peer);
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

}  // namespace

void translate_errors() { py::register_exception_translator(raise_peer_errors); }

}  // namespace moe_a2a::bindings
