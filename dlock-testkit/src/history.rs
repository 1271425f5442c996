//! A history of who held a lock, checked while real tasks run.

use std::sync::{Mutex, PoisonError};

use dlock::{Guard, Mode};

/// Checks that holders which exclude each other do not overlap and that tokens rise,
/// at the moment it happens. A counter that is compared at the end would pass without
/// any lock.
#[derive(Debug, Default)]
pub struct History(Mutex<Inside>);

#[derive(Debug, Default)]
struct Inside {
    readers: u32,
    writers: u32,
    last_writer: u64,
    last_reader: u64,
    entries: u64,
    faults: Vec<String>,
}

impl History {
    /// Records that the holder of this guard entered the critical section. It leaves
    /// when the returned entry is dropped.
    pub fn enter(&self, guard: &Guard) -> Entry<'_> {
        let mut inside = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let token = guard.token().get();
        let shared = guard.mode() == Mode::Shared;
        let Inside { readers, writers, last_writer, last_reader, .. } = *inside;
        let crowded = if shared { writers > 0 } else { readers + writers > 0 };
        if crowded {
            inside
                .faults
                .push(format!("{guard:?} entered beside {writers} writers, {readers} readers"));
        }
        let stale =
            if shared { token <= last_writer } else { token <= last_writer.max(last_reader) };
        if stale {
            inside.faults.push(format!("token {token} after {last_writer} and {last_reader}"));
        }
        if shared {
            inside.readers += 1;
            inside.last_reader = last_reader.max(token);
        } else {
            inside.writers += 1;
            inside.last_writer = last_writer.max(token);
        }
        inside.entries += 1;
        Entry { history: self, shared }
    }

    /// The number of entries so far.
    pub fn entries(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entries
    }

    /// The violations found so far.
    pub fn faults(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).faults.clone()
    }

    /// Panics if a violation was found.
    #[track_caller]
    pub fn assert_clean(&self) {
        assert_eq!(self.faults(), Vec::<String>::new());
    }
}

/// A holder inside the critical section. Dropping it means leaving.
#[derive(Debug)]
pub struct Entry<'a> {
    history: &'a History,
    shared: bool,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let mut inside = self.history.0.lock().unwrap_or_else(PoisonError::into_inner);
        if self.shared {
            inside.readers -= 1;
        } else {
            inside.writers -= 1;
        }
    }
}
