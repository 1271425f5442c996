//! The test kit of dlock: a seeded simulation of the state machines, checkers of
//! lock histories, a backend and a proxy that fail on demand, real Redis servers,
//! topologies of them and processes for tests, and the conformance suite of a backend.

pub mod chaos;
pub mod commit_proxy;
pub mod conformance;
pub mod consul;
pub mod database_servers;
pub mod etcd;
pub mod failover;
pub mod failover_watch;
mod faulty_backend;
mod history;
pub mod holder;
pub mod interop;
pub mod interval;
pub mod latencies;
pub mod ports;
pub mod process;
pub mod proxy;
pub mod record_checker;
pub mod redis;
pub mod resp;
pub mod sale;
mod server_process;
pub mod servers;
pub mod session_faults;
pub mod session_servers;
pub mod sim;
mod single_calls;
pub mod topology;
pub mod zookeeper;

pub use faulty_backend::{FaultControl, FaultMode, FaultyBackend};
pub use history::{Entry, History};
pub use single_calls::SingleCalls;
