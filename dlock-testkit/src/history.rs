//! Who was inside when, for tests that run real tasks.

use std::sync::{Mutex, PoisonError};

use dlock::{Guard, Mode};

/// Judges overlap and tokens as they happen. A count to N at the end would pass
/// without any lock.
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
    /// The holder of this guard enters; it leaves when the stay is dropped.
    pub fn enter(&self, guard: &Guard) -> Stay<'_> {
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
        Stay { history: self, shared }
    }

    /// How many entered so far.
    pub fn entries(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entries
    }

    /// What was wrong.
    pub fn faults(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).faults.clone()
    }

    /// Panics if anything was wrong.
    #[track_caller]
    pub fn assert_clean(&self) {
        assert_eq!(self.faults(), Vec::<String>::new());
    }
}

/// Somebody inside.
#[derive(Debug)]
pub struct Stay<'a> {
    history: &'a History,
    shared: bool,
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        let mut inside = self.history.0.lock().unwrap_or_else(PoisonError::into_inner);
        if self.shared {
            inside.readers -= 1;
        } else {
            inside.writers -= 1;
        }
    }
}
