//! What operators and callers do in a simulation besides locking: break locks, ask again
//! inside a lock, shut a process down.

use std::sync::Arc;
use std::time::Duration;

use dlock::backend::memory::lock_table::SentNotice;
use dlock::backend::{Break, BreakTarget, Moment};
use dlock::machine::{Engine, LeaseStatus, LockRequest, QueueScope, Wait};
use dlock::{Holder, Key, Mode};
use rand::RngExt as _;

use super::{Event, Simulation, TaskRun, TaskState, TaskStep};

fn operator() -> Holder {
    Holder { client: 0, name: "operator".into(), host: "sim".into(), pid: 0, tags: Vec::new() }
}

impl Simulation {
    pub(super) fn plan_breaks(&mut self) {
        if !self.plan.breaks {
            return;
        }
        for _ in 0..self.random.random_range(0..4) {
            let at = self.between(Duration::ZERO, self.plan.tasks_until);
            let key = self.random.random_range(0..self.plan.keys);
            self.at(at, Event::Break { key });
        }
    }

    /// Breaks a key that was just granted, now and then, so that the notice may overtake
    /// the grant.
    pub(super) fn break_soon(&mut self, key: &Key) {
        if !self.plan.breaks || !self.random.random_ratio(1, 100) {
            return;
        }
        if let Some(key) = self.keys[..self.plan.keys].iter().position(|known| known == key) {
            let after = self.between(Duration::ZERO, Duration::from_millis(3));
            self.after(after, Event::Break { key });
        }
    }

    pub(super) fn break_key(&mut self, key: usize) {
        let number = self.server_of(key);
        if self.servers[number].down || self.servers[number].stopped {
            return;
        }
        let is_calm = self.now > self.plan.settled_at;
        if is_calm {
            if self.calm_breaks == 0 {
                return; // each costs who waits about a second
            }
            self.calm_breaks -= 1;
        }
        let histories = [key, self.keys.len() + key];
        let until = self.now + self.longest_lease();
        if !is_calm {
            histories.iter().for_each(|history| self.checker.broken_unheard(*history, until));
        }
        for history in histories {
            let runs: Vec<_> = self.checker.holders(history).collect();
            let holders = runs.into_iter().filter(|run| self.is_held(*run, key)).collect();
            let delay = self.plan.break_delay;
            self.after(delay, Event::BreakOver { key: history, holders });
        }
        let mut sent = Vec::new();
        let server = &mut self.servers[number];
        let now = server.clock.at(self.now);
        for target in [BreakTarget::Lock, BreakTarget::Permits] {
            let how = Break { by: Arc::new(operator()), target, delay: self.plan.break_delay };
            server.queue.break_lock(now, &self.keys[key], &how, &mut sent);
        }
        for SentNotice { client, owner, notice, .. } in sent {
            self.deliver(Event::Notice { client, server: number, owner, notice });
        }
    }

    fn is_held(&self, run: TaskRun, key: usize) -> bool {
        let process = &self.processes[run.process];
        let task = &process.tasks[run.task];
        let is_same = process.incarnation == run.incarnation && task.round == run.round;
        let Some(ticket) = task.ticket.filter(|_| is_same && task.state == TaskState::Holding)
        else {
            return false;
        };
        let machine = &process.machines[self.server_of(key)];
        matches!(machine.status(process.clock.at(self.now), ticket), LeaseStatus::Held { .. })
    }

    /// Checks that everybody who held a lock when it was broken knows it.
    pub(super) fn check_broken(&mut self, history: usize, holders: &[TaskRun]) {
        let key = history % self.keys.len();
        if self.checker.is_excused(history, self.now, self.longest_lease()) {
            return;
        }
        if let Some(run) = holders.iter().find(|run| self.is_held(**run, key)) {
            self.checker.violated(|| format!("row 28: {run:?} was not told that k{key} is broken"));
        }
    }

    /// The task inside whose lock this one asks.
    pub(super) fn parent_of(&self, task: usize) -> Option<usize> {
        task.checked_sub(self.plan.tasks).map(|child| child / 2)
    }

    /// Lets two tasks ask inside this lock while it is held.
    pub(super) fn start_inside(&mut self, run: TaskRun, hold: Duration) {
        for child in 0..2 {
            let task = self.plan.tasks + 2 * run.task + child;
            let round = self.processes[run.process].tasks[task].round;
            let after = hold.mul_f64(self.random.random_range(0.0..0.5));
            let child = TaskRun { task, round, ..run };
            self.after(after, Event::Task { run: child, step: TaskStep::Ask });
        }
    }

    pub(super) fn ask_inside(&mut self, run: TaskRun, parent: usize) {
        let outer = self.processes[run.process].tasks[parent].clone();
        // After a pause it may hold something else by now. A client nests nothing in permits.
        let is_parent = outer.state == TaskState::Holding && !outer.mode.is_permits();
        let Some(ticket) = outer.ticket.filter(|_| is_parent) else { return };
        // Asking for more inside a read lock would be a deadlock, and is refused before.
        let mode = if outer.mode == Mode::Shared || self.chance(40) {
            Mode::Shared
        } else {
            Mode::Exclusive
        };
        let local = self.processes[run.process].clock.at(self.now);
        let wait = match self.random.random_range(0..3) {
            0 => Wait::Try,
            1 => Wait::Until(local + self.between(Duration::ZERO, Duration::from_millis(20))),
            _ => Wait::Until(Moment::NEVER),
        };
        let key = self.keys[outer.key].clone();
        let ask = LockRequest {
            key: &key,
            mode,
            ttl: self.plan.ttl,
            wait,
            scope: QueueScope::Nested(ticket),
            max_hold: None,
            holder: self.holder(run),
        };
        if self.chance(self.plan.cancels) {
            let after = self.between(Duration::ZERO, Duration::from_millis(20));
            self.after(after, Event::Task { run, step: TaskStep::Cancel });
        }
        let inside = TaskRun { task: parent, round: outer.round, ..run };
        self.enqueue(run, outer.key, Some(inside), ask);
    }

    pub(super) fn shut_down(&mut self, process: usize, grace: Duration) {
        self.processes[process].shutting_down = true;
        for server in 0..self.plan.servers {
            self.step(process, server, Engine::close);
        }
        let incarnation = self.processes[process].incarnation;
        self.after(grace, Event::GraceOver { process, incarnation });
    }

    pub(super) fn grace_over(&mut self, process: usize) {
        for server in 0..self.plan.servers {
            self.step(process, server, |machine, _, actions| machine.revoke_all(actions));
        }
        let incarnation = self.processes[process].incarnation;
        for task in 0..self.processes[process].tasks.len() {
            let it = &self.processes[process].tasks[task];
            let (run, key) = (TaskRun { process, incarnation, task, round: it.round }, it.key);
            if self.is_held(run, key) {
                self.checker.violated(|| format!("rule 16: {run:?} holds k{key} after the grace"));
            }
        }
    }

    /// The process ends; another one takes its place.
    pub(super) fn shutdown_over(&mut self, process: usize) {
        let it = &self.processes[process];
        if !it.alive || !it.shutting_down {
            return; // killed meanwhile
        }
        if it.machines.iter().all(Engine::is_idle) {
            self.shut_down.push(it.client);
        }
        self.checker.remove_all(|run| run.process == process);
        self.replace_process(process);
    }

    pub(super) fn replace_process(&mut self, process: usize) {
        self.count_coverage(process);
        let incarnation = self.processes[process].incarnation + 1;
        self.processes[process] = self.new_process(incarnation);
        self.start_tasks(process);
    }

    pub(super) fn count_coverage(&mut self, process: usize) {
        for machine in &self.processes[process].machines {
            self.report.coverage.add(&machine.coverage());
        }
    }
}
