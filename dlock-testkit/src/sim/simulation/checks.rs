//! The checks of a simulation: overlaps, stalls, and what is left at the end.

use dlock::machine::LeaseStatus;

use super::{CHECK_INTERVAL, Event, STALL, Simulation, Task, TaskState};

impl Simulation {
    pub(super) fn check_overlap(&mut self, history: usize) {
        let (processes, now, keys) = (&self.processes, self.now, self.keys.len());
        let servers = self.plan.servers;
        self.checker.overlap(history, now, |run| {
            let process = &processes[run.process];
            let Some(ticket) = process.tasks[run.task].ticket else { return false };
            let machine = &process.machines[(history % keys) % servers];
            matches!(machine.status(process.clock.at(now), ticket), LeaseStatus::Held { .. })
        });
    }

    pub(super) fn check_server(&mut self, server: usize) {
        for key in (server..self.keys.len()).step_by(self.plan.servers) {
            self.check_overlap(key);
            self.check_overlap(self.keys.len() + key);
        }
    }

    /// Checks that no lock stays free while a task waits for it.
    pub(super) fn check_progress(&mut self) {
        for key in 0..self.plan.keys {
            let server = &self.servers[self.server_of(key)];
            let free = server.queue.is_free(server.clock.at(self.now), &self.keys[key])
                && !server.down
                && !server.stopped;
            let since = if free { Some(self.free_since[key].unwrap_or(self.now)) } else { None };
            self.free_since[key] = since;
            let waits_long = |task: &Task| {
                task.state == TaskState::Waiting
                    && task.key == key
                    && !task.mode.is_permits()
                    && self.now - task.since > STALL
            };
            let stalls = since.is_some_and(|since| self.now - since > STALL)
                && self.now > self.plan.settled_at
                && self.processes.iter().any(|process| process.tasks.iter().any(waits_long));
            if stalls {
                self.checker.violated(|| format!("I4: k{key} is free and somebody waits for it"));
            }
        }
        self.after(CHECK_INTERVAL, Event::CheckProgress);
    }

    /// Checks at the end that no process or server has anything left.
    pub(super) fn check_nothing_left(&mut self) {
        if self.checker.violation.is_some() {
            return;
        }
        for (number, process) in self.processes.iter().enumerate() {
            let stuck = process.tasks.iter().find(|task| task.state != TaskState::Idle);
            if let Some(task) = stuck {
                let task = task.clone();
                self.checker.violated(|| format!("I4: a task of p{number} never ended: {task:?}"));
            }
            for machine in &process.machines {
                if !machine.is_idle() {
                    self.checker.violated(|| {
                        format!("I3: p{number} is at rest, but something is left: {machine:?}")
                    });
                }
            }
        }
        let mut living: Vec<u64> = self.processes.iter().map(|process| process.client).collect();
        living.extend(&self.shut_down);
        for server in &self.servers {
            let now = server.clock.at(self.now);
            for key in &self.keys {
                let state = server.queue.inspect(now, key);
                let left = state.holders.iter().map(|held| &held.holder);
                let left = left.chain(state.waiters.iter().map(|waiter| &waiter.holder));
                for holder in left {
                    if living.contains(&holder.client) && !self.plan.allows_late_grants() {
                        self.checker.violated(|| {
                            format!(
                                "I3: something of {} is left at a server: {state:?}",
                                holder.name
                            )
                        });
                    }
                }
            }
        }
    }
}
