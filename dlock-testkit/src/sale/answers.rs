//! The answers that the workers of a soak received. A worker writes each answer to a
//! file before it does anything else; at the end they are compared with the records of
//! the sale.
//!
//! A line is an id, a kind and a value, as JSON. It is written by one system call, so
//! that it is complete even if the process is killed right after.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;

use dlock_segment::{Hold, HoldState, Inventory, Receipt, Resolved};
use serde_json::{Value, json};

/// How many answers are compared at a time.
const PAGE: usize = 50_000;

/// The kind of an answer that has no record.
const RESIZED: &str = "resized";

/// The file of a worker's answers.
#[derive(Debug)]
pub(super) struct Answers {
    file: File,
}

impl Answers {
    pub(super) fn append_to(path: &Path) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(path);
        Answers { file: file.expect("a file for the answers") }
    }

    fn write(&self, id: &str, word: &str, value: Value) {
        let line = format!("{}\n", json!([id, word, value]));
        (&self.file).write_all(line.as_bytes()).expect("the answer is written down");
    }

    pub(super) fn taken(&self, id: &str, receipt: &Receipt) {
        self.write(id, "taken", json!(receipt));
    }

    pub(super) fn held(&self, id: &str, hold: &Hold) {
        self.write(id, "held", json!(hold.receipt));
        self.stands(id, hold.state);
    }

    pub(super) fn confirmed(&self, id: &str, receipt: &Receipt) {
        self.write(id, "held", json!(receipt));
        self.stands(id, HoldState::Confirmed);
    }

    /// Writes the state of a reservation, if it is final. What was refunded was confirmed.
    pub(super) fn stands(&self, id: &str, state: HoldState) {
        match state {
            HoldState::Open => {}
            HoldState::Refunded => self.stands(id, HoldState::Confirmed),
            state => self.write(id, "stands", json!(state)),
        }
    }

    pub(super) fn lasts_until(&self, id: &str, hold: &Hold) {
        self.write(id, "until", json!(hold.expires_at));
    }

    pub(super) fn refunded(&self, id: &str, receipt: &Receipt) {
        self.write(id, "refunded", json!(receipt));
    }

    pub(super) fn restocked(&self, id: &str, receipt: &Receipt) {
        self.write(id, "restocked", json!(receipt));
    }

    pub(super) fn resized(&self, id: &str, segments: u32) {
        self.write(id, RESIZED, json!(segments));
    }

    pub(super) fn not_applied(&self, id: &str) {
        self.write(id, "not applied", Value::Null);
    }

    pub(super) fn resolved(&self, id: &str, resolved: &Resolved) {
        match resolved {
            Resolved::Taken(receipt) => self.taken(id, receipt),
            Resolved::RefundDone(receipt) => self.refunded(id, receipt),
            Resolved::Restocked(receipt) => self.restocked(id, receipt),
            Resolved::NotApplied => self.not_applied(id),
            other => panic!("{id}: {other:?}"),
        }
    }
}

type Line = (String, String, Value);

/// The answers of all workers.
#[derive(Debug, Default)]
pub(super) struct ReceivedAnswers {
    count: u64,
    lost: u64,
    resizes: u64,
    deliveries: BTreeMap<String, u64>,
}

impl ReceivedAnswers {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// How many answers do not agree with the record of their id.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// How many resizes were answered.
    pub(super) fn resizes(&self) -> u64 {
        self.resizes
    }

    /// The number of units that were restocked, each restock counted once.
    pub(super) fn restocked(&self) -> u64 {
        self.deliveries.values().sum()
    }

    /// Compares the answers of a worker with the records of the sale.
    pub(super) async fn compare(&mut self, sale: &Inventory, answers: &Path) {
        let file = BufReader::new(File::open(answers).expect("the answers of a worker"));
        let mut lines = file.lines();
        loop {
            let mut page: HashMap<String, Vec<(String, Value)>> = HashMap::new();
            for line in lines.by_ref().take(PAGE) {
                let line = line.expect("a line");
                let (id, word, value): Line = serde_json::from_str(&line).expect("an answer");
                if word == "restocked" {
                    let quantity = value["quantity"].as_u64().expect("a quantity");
                    self.deliveries.insert(id.clone(), quantity);
                }
                self.count += 1;
                if word == RESIZED {
                    self.resizes += 1;
                    continue;
                }
                page.entry(id).or_default().push((word, value));
            }
            if page.is_empty() {
                return;
            }
            self.lost += super::with_records(sale, page, |id, received, resolved| {
                compare_all(id, received, resolved)
            })
            .await;
        }
    }
}

/// The answers that do not agree with the record, in words.
fn compare_all(id: &str, received: &[(String, Value)], resolved: &Resolved) -> Vec<String> {
    let differ = received.iter().filter(|(word, value)| !agrees(word, value, resolved));
    let said = |(word, value): &(String, Value)| {
        format!("{id} was answered {word} {value}, but the record is {resolved:?}")
    };
    differ.map(said).collect()
}

/// Whether an answer agrees with the record. Units may have been given back since, so what
/// is left of a receipt is not compared, and a sale may be one that was refunded. The effect
/// of a receipt follows its reservation.
fn agrees(word: &str, value: &Value, resolved: &Resolved) -> bool {
    use Resolved::{
        Cancelled, Confirmed, Expired, Held, NotApplied, RefundDone, Refunded, Restocked, Taken,
    };
    match (word, resolved) {
        ("taken", Taken(receipt) | Refunded(receipt))
        | ("refunded", RefundDone(receipt))
        | ("restocked", Restocked(receipt))
        | ("held", Confirmed(receipt) | Refunded(receipt)) => same_effect(receipt, value),
        ("held", Held(hold) | Expired(hold) | Cancelled(hold)) => same_effect(&hold.receipt, value),
        ("stands", Confirmed(_) | Refunded(_)) => json!(HoldState::Confirmed) == *value,
        ("stands", Expired(hold) | Cancelled(hold)) => json!(hold.state) == *value,
        ("until", Held(hold) | Expired(hold) | Cancelled(hold)) => {
            Some(hold.expires_at) >= value.as_u64()
        }
        // A receipt does not say until when the units were reserved.
        ("until", Confirmed(_) | Refunded(_)) => true,
        ("not applied", NotApplied) => true,
        _ => false,
    }
}

fn same_effect(receipt: &Receipt, value: &Value) -> bool {
    let (mut receipt, mut value) = (json!(receipt), value.clone());
    for receipt in [&mut receipt, &mut value] {
        for changes in ["left", "effect"] {
            receipt.as_object_mut().expect("a receipt").remove(changes);
        }
    }
    receipt == value
}
