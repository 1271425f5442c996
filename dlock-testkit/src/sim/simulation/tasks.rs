//! The tasks of a simulation: they request a lock, hold it, write and release.

use std::sync::Arc;
use std::time::Duration;

use dlock::backend::{Moment, Release};
use dlock::machine::Bug;
use dlock::machine::{LeaseStatus, LockRequest, Outcome, QueueScope, Refusal, Ticket, Wait};
use dlock::{Holder, LossReason, Mode, ReleaseOutcome};
use rand::RngExt as _;

use super::{CALM_HOLD, Event, LONGEST_WAIT, Simulation, Task, TaskRun, TaskState, TaskStep};

impl Simulation {
    pub(super) fn task_step(&mut self, run: TaskRun, step: TaskStep) {
        let TaskRun { process, task, .. } = run;
        let current = &self.processes[process].tasks[task];
        if current.round != run.round {
            return;
        }
        match (step, current.state) {
            (TaskStep::Ask, TaskState::Idle) => match self.parent_of(task) {
                Some(parent) => self.ask_inside(run, parent),
                None => self.ask(run),
            },
            (TaskStep::Cancel, TaskState::Waiting) => self.drop_ticket(run),
            (TaskStep::Write, TaskState::Holding) => self.write(run),
            (TaskStep::Done, TaskState::Holding) => self.done(run),
            _ => {}
        }
    }

    fn is_all_day_holder(&self, run: TaskRun) -> bool {
        self.plan.all_day_holder && run.process == 0 && run.task == 0
    }

    pub(super) fn ask(&mut self, run: TaskRun) {
        if self.now >= self.plan.tasks_until {
            return; // the run is over
        }
        let all_day_holder = self.is_all_day_holder(run);
        let key = if all_day_holder {
            self.plan.keys
        } else {
            self.random.random_range(0..self.plan.keys)
        };
        let mode = if all_day_holder {
            Mode::Exclusive
        } else if self.chance(self.plan.permits) {
            Mode::Permits { count: self.random.random_range(1..=3), of: 3 }
        } else if self.chance(self.plan.shared) {
            Mode::Shared
        } else {
            Mode::Exclusive
        };
        let local = self.processes[run.process].clock.at(self.now);
        let wait = if self.chance(self.plan.tries) {
            Wait::Try
        } else if self.chance(30) {
            Wait::Until(local + self.between(Duration::from_millis(1), Duration::from_secs(2)))
        } else {
            Wait::Until(Moment::NEVER)
        };
        let own = mode.is_permits() || self.chance(self.plan.fair);
        let max_hold = (!all_day_holder && self.chance(5)).then(|| Duration::from_millis(30));
        let wanted = self.keys[key].clone();
        let ask = LockRequest {
            key: &wanted,
            mode,
            ttl: self.plan.ttl,
            wait,
            scope: if own { QueueScope::Separate } else { QueueScope::Shared },
            max_hold,
            holder: self.holder(run),
        };
        if self.chance(self.plan.cancels) {
            let after = self.between(Duration::ZERO, Duration::from_millis(50));
            self.after(after, Event::Task { run, step: TaskStep::Cancel });
        }
        self.enqueue(run, key, None, ask);
    }

    /// What the process of this run calls itself.
    pub(super) fn holder(&self, run: TaskRun) -> Arc<Holder> {
        Arc::new(Holder {
            client: self.processes[run.process].client,
            name: format!("p{}", run.process),
            host: "sim".into(),
            pid: run.incarnation,
            tags: Vec::new(),
        })
    }

    pub(super) fn enqueue(
        &mut self,
        run: TaskRun,
        key: usize,
        inside: Option<TaskRun>,
        ask: LockRequest<'_>,
    ) {
        let (now, mode) = (self.now, ask.mode);
        let task = &mut self.processes[run.process].tasks[run.task];
        *task = Task {
            state: TaskState::Waiting,
            round: run.round,
            ticket: None,
            key,
            mode,
            since: now,
            loss_reported: false,
            inside,
        };
        let server = self.server_of(key);
        let mut enqueued = None;
        self.step(run.process, server, |machine, now, actions| {
            enqueued = machine.enqueue(now, ask, run.task, actions).ok();
        });
        self.processes[run.process].tasks[run.task].ticket = enqueued;
        match enqueued {
            Some(ticket) => self.wake(run.process, server, ticket),
            None => self.pause(run),
        }
    }

    /// Handles a change of a ticket.
    pub(super) fn wake(&mut self, process: usize, server: usize, ticket: Ticket) {
        let machine = &mut self.processes[process].machines[server];
        let Some(task) = machine.payload_mut(ticket).copied() else { return };
        let current = &self.processes[process].tasks[task];
        if current.ticket != Some(ticket) {
            return;
        }
        let (state, key, mode) = (current.state, current.key, current.mode);
        let run = TaskRun {
            process,
            incarnation: self.processes[process].incarnation,
            task,
            round: current.round,
        };
        let machine = &mut self.processes[process].machines[server];
        match state {
            TaskState::Waiting => match machine.outcome(ticket) {
                Outcome::Waiting => {}
                Outcome::Refused(refusal) => self.refused(run, &refusal),
                Outcome::Lost(reason) => {
                    self.log(|| format!("{run:?} lost it before it ran: {reason:?}"));
                    self.drop_ticket(run);
                }
                Outcome::Admitted { token, handed_over, .. } => {
                    self.admitted(run, key, mode, token, handed_over);
                }
            },
            TaskState::Holding => {
                let local = self.processes[process].clock.at(self.now);
                let status = self.processes[process].machines[server].status(local, ticket);
                if let LeaseStatus::Lost(LossReason::Deadline) = status {
                    self.check_loss(run, key);
                    self.processes[process].tasks[task].loss_reported = true;
                }
                // Half of the bodies stop when the lock is lost, half go on.
                if let LeaseStatus::Lost(_) = status
                    && self.chance(50)
                {
                    self.drop_ticket(run);
                }
            }
            TaskState::Releasing => {
                if let Some(outcome) = machine.released(ticket) {
                    if let Ok(ReleaseOutcome::Released) | Err(_) = outcome {
                        self.log(|| format!("{run:?} released"));
                    }
                    self.pause(run);
                }
            }
            TaskState::Idle => {}
        }
    }

    fn refused(&mut self, run: TaskRun, refusal: &Refusal) {
        self.log(|| format!("{run:?} refused: {refusal:?}"));
        if let Refusal::Failed(error) | Refusal::TimedOut { trouble: Some(error), .. } = refusal
            && !error.kind().is_retryable()
        {
            self.checker.violated(|| format!("I6: {error}"));
        }
        self.pause(run);
    }

    fn admitted(&mut self, run: TaskRun, key: usize, mode: Mode, token: u64, handed_over: bool) {
        self.log(|| format!("{run:?} admitted to k{key} {mode:?} token {token} {handed_over}"));
        self.report.admissions += 1;
        self.report.handovers += u64::from(handed_over);
        let history = self.history_of(key, mode);
        let (now, lease) = (self.now, self.longest_lease());
        let task = &mut self.processes[run.process].tasks[run.task];
        task.state = TaskState::Holding;
        let waited = now - task.since;
        task.since = now;
        self.check_wait(run, key, waited);
        let outer = self.processes[run.process].tasks[run.task].inside;
        match outer {
            Some(outer) => self.checker.admitted_inside(history, run, outer, mode, token),
            None => {
                if self.processes[run.process].shutting_down {
                    self.checker.violated(|| format!("rule 16: {run:?} was admitted to k{key}"));
                }
                self.checker.admitted(history, run, mode, token, now, lease);
            }
        }
        if let Some(since) = self.free_since.get_mut(key) {
            *since = None; // it was granted, however free it was at each check
        }
        self.check_overlap(history);
        if handed_over && outer.is_none() {
            self.check_handover(run, key);
        }
        let hold = if self.is_all_day_holder(run) {
            self.plan.tasks_until.saturating_sub(self.now)
        } else if self.is_faulty() && self.chance(self.plan.long_holds) {
            self.between(Duration::ZERO, self.plan.ttl.min(Duration::from_secs(1)) * 2)
        } else if self.is_faulty() {
            self.between(Duration::ZERO, self.plan.longest_hold)
        } else if self.plan.breaks && self.chance(5) {
            self.between(Duration::ZERO, 2 * self.plan.break_delay) // longer than a break
        } else {
            self.between(Duration::ZERO, CALM_HOLD)
        };
        self.after(hold, Event::Task { run, step: TaskStep::Done });
        let half_way = hold.mul_f64(self.random.random_range(0.0..1.0));
        self.after(half_way, Event::Task { run, step: TaskStep::Write });
        if outer.is_none() && !mode.is_permits() && self.chance(self.plan.nested) {
            self.start_inside(run, hold);
        }
    }

    fn lease_status(&self, run: TaskRun, key: usize) -> Option<(LeaseStatus, Moment)> {
        let process = &self.processes[run.process];
        let ticket = process.tasks[run.task].ticket?;
        let local = process.clock.at(self.now);
        Some((process.machines[self.server_of(key)].status(local, ticket), local))
    }

    fn check_handover(&mut self, run: TaskRun, key: usize) {
        let half = self.plan.ttl.min(Duration::from_secs(3)).mul_f64(0.45);
        if let Some((LeaseStatus::Held { until, .. }, local)) = self.lease_status(run, key)
            && until.since(local) < half
            && until.since(local) > Duration::from_millis(30)
        // not just max_hold
        {
            self.checker.violated(|| {
                format!("I4: k{key} was handed over to {run:?} with little of its ttl left")
            });
        }
    }

    /// Checks that a fault explains why a lock was lost by its deadline.
    fn check_loss(&mut self, run: TaskRun, key: usize) {
        let excuse = self.plan.ttl / 2 + 3 * self.plan.call_timeout;
        if self.now > self.last_trouble + excuse && self.active_faults == 0 {
            self.checker.violated(|| {
                format!("I4: {run:?} lost k{key}, though nothing kept it from being renewed")
            });
        }
    }

    fn check_wait(&mut self, run: TaskRun, key: usize, waited: Duration) {
        let calm = self.now.saturating_sub(self.plan.settled_at);
        if waited.min(calm) > LONGEST_WAIT {
            self.checker.violated(|| format!("I4: {run:?} waited {waited:?} for k{key}"));
        }
    }

    fn write(&mut self, run: TaskRun) {
        let task = self.processes[run.process].tasks[run.task].clone();
        let status = self.lease_status(run, task.key);
        let held = matches!(status, Some((LeaseStatus::Held { .. }, _)));
        let history = self.history_of(task.key, task.mode);
        let unfenced = self.plant == Some(Bug::UnfencedWrite);
        let (now, lease) = (self.now, self.longest_lease());
        self.checker.write(history, run, held, unfenced, now, lease);
    }

    fn done(&mut self, run: TaskRun) {
        self.write(run);
        let key = self.processes[run.process].tasks[run.task].key;
        if let Some((LeaseStatus::Lost(LossReason::Deadline), _)) = self.lease_status(run, key)
            && !self.processes[run.process].tasks[run.task].loss_reported
        {
            self.check_loss(run, key);
        }
        let task = self.processes[run.process].tasks[run.task].clone();
        let Some(ticket) = task.ticket else { return };
        let server = self.server_of(task.key);
        let inside = self.parent_of(run.task).is_some();
        if task.mode == Mode::Exclusive && !inside && self.chance(self.plan.downgrades) {
            self.checker.downgraded(task.key, run, 0); // from now on readers may share the lock
            let token = self.step(run.process, server, |machine, now, actions| {
                machine.downgrade(now, ticket, actions)
            });
            if let Some(token) = token {
                self.processes[run.process].tasks[run.task].mode = Mode::Shared;
                self.checker.downgraded(task.key, run, token);
                self.check_overlap(task.key);
                let more = self.between(Duration::ZERO, self.plan.longest_hold);
                return self.after(more, Event::Task { run, step: TaskStep::Done });
            }
        }
        if self.chance(50) {
            return self.drop_ticket(run);
        }
        let history = self.history_of(task.key, task.mode);
        self.checker.removed(history, run);
        self.processes[run.process].tasks[run.task].state = TaskState::Releasing;
        // There is no notice when such a key becomes free, so waits are longer.
        let how = if task.mode != Mode::Shared && self.is_faulty() && self.chance(10) {
            Release::After(self.between(Duration::from_millis(1), Duration::from_millis(50)))
        } else {
            Release::Now
        };
        self.step(run.process, server, |machine, now, actions| {
            machine.release(now, ticket, how, actions);
        });
    }

    /// Drops a future or a guard.
    fn drop_ticket(&mut self, run: TaskRun) {
        let task = self.processes[run.process].tasks[run.task].clone();
        let history = self.history_of(task.key, task.mode);
        self.checker.removed(history, run);
        self.pause(run);
        if let Some(ticket) = task.ticket {
            let server = self.server_of(task.key);
            self.step(run.process, server, |machine, now, actions| {
                machine.forget(now, ticket, actions);
            });
        }
    }

    fn pause(&mut self, run: TaskRun) {
        let task = &mut self.processes[run.process].tasks[run.task];
        task.state = TaskState::Idle;
        task.round += 1;
        task.ticket = None;
        let run = TaskRun { round: task.round, ..run };
        if self.parent_of(run.task).is_some() {
            return; // the next holder starts it again
        }
        let pause = self.between(Duration::ZERO, self.plan.longest_pause(run.process));
        self.after(pause, Event::Task { run, step: TaskStep::Ask });
    }
}
