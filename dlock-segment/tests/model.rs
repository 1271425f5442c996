//! Random operations against a simple model, on both stores, with I2 after each
//! step; and the bugs planted in the embedded store that this must find.
//! The model keeps a list of operations and counts by going through all of it.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::Place;
use dlock_segment::store::memory::Memory;
use dlock_segment::{
    Bug, Deduction, Effect, Error, HoldState, Inventory, Receipt, Refund, Reservation, Resolved,
};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Deduction,
    Reservation(HoldState),
    Refund,
    Restock,
    Tombstone,
}

#[derive(Clone, Debug)]
struct Operation {
    what: What,
    quantity: u64,
    refunded: u64,
    whose: Option<String>,
    receipt: Option<Receipt>,
}

#[derive(Debug)]
struct Model {
    supplied: u64,
    anonymous: u64,
    per_buyer: u64,
    operations: BTreeMap<String, Operation>,
}

impl Operation {
    fn sold(&self) -> u64 {
        let sells = [What::Deduction, What::Reservation(HoldState::Confirmed)];
        if sells.contains(&self.what) { self.quantity - self.refunded } else { 0 }
    }

    /// The state of a reservation as a caller sees it.
    fn state(&self) -> HoldState {
        match self.what {
            What::Reservation(HoldState::Confirmed) if self.refunded > 0 => HoldState::Refunded,
            What::Reservation(state) => state,
            _ => HoldState::Refused,
        }
    }

    /// What the same request again, or a resolve, answers.
    fn answer(&self) -> &'static str {
        match self.what {
            What::Deduction if self.refunded > 0 => "refunded",
            What::Deduction => "taken",
            What::Reservation(_) => word(self.state()),
            What::Refund => "refund",
            What::Restock => "restock",
            What::Tombstone => "refused",
        }
    }

    /// The receipt, as it is by now.
    fn receipt(&self) -> Option<Receipt> {
        let mut receipt = self.receipt.clone()?;
        let left = self.quantity - self.refunded;
        (receipt.left, receipt.effect) = match self.what {
            What::Reservation(HoldState::Cancelled) => (0, Effect::Cancelled),
            What::Reservation(HoldState::Expired) => (0, Effect::Expired),
            What::Reservation(HoldState::Confirmed) => (left, Effect::Confirmed),
            _ => (left, receipt.effect),
        };
        Some(receipt)
    }

    fn reserved(&self) -> u64 {
        if self.what == What::Reservation(HoldState::Open) { self.quantity } else { 0 }
    }
}

impl Model {
    fn reserved(&self) -> u64 {
        self.operations.values().map(Operation::reserved).sum()
    }

    fn sold(&self) -> u64 {
        self.anonymous + self.operations.values().map(Operation::sold).sum::<u64>()
    }

    fn available(&self) -> u64 {
        self.supplied - self.reserved() - self.sold()
    }

    fn has(&self, buyer: &str) -> u64 {
        let theirs = self.operations.values().filter(|it| it.whose.as_deref() == Some(buyer));
        theirs.map(|it| it.sold() + it.reserved()).sum()
    }

    /// The refusal, if there is one.
    fn refusal(&self, quantity: u64, buyer: &str) -> &'static str {
        if self.has(buyer) + quantity > self.per_buyer {
            "limit"
        } else if self.available() == 0 {
            "sold out"
        } else if self.available() < quantity {
            "not enough"
        } else {
            ""
        }
    }
}

struct Walk {
    sale: Inventory,
    model: Model,
    random: StdRng,
}

/// A random quantity, mostly small.
fn segments(random: &mut StdRng) -> u32 {
    let few = random.random_range(1..9);
    if random.random_ratio(1, 8) { 75 * few } else { few }
}

/// The description of what went wrong.
type Verdict = Result<(), String>;

fn agree(what: &str, is: impl std::fmt::Debug, should_be: impl std::fmt::Debug) -> Verdict {
    let (is, should_be) = (format!("{is:?}"), format!("{should_be:?}"));
    if is == should_be { Ok(()) } else { Err(format!("{what}: {is} instead of {should_be}")) }
}

impl Walk {
    async fn new(place: &Place, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let (stock, per_buyer) = (random.random_range(1..40), random.random_range(2..30));
        let sale = Inventory::builder(&place.dlock, format!("model-{seed}"))
            .stock(stock)
            .segments(segments(&mut random))
            .per_buyer(per_buyer)
            .sold_out_for(Duration::ZERO)
            .create()
            .await
            .expect("a sale");
        let model = Model { supplied: stock, anonymous: 0, per_buyer, operations: BTreeMap::new() };
        Walk { sale, model, random }
    }

    fn id(&mut self, kind: &str) -> String {
        format!("{kind}{}", self.random.random_range(0..8))
    }

    async fn step(&mut self) -> Verdict {
        let quantity = [1, 1, 2, 3, 9][self.random.random_range(0..5)];
        let buyer = self.id("u");
        match self.random.random_range(0..12) {
            0..=2 => self.deduct(quantity, buyer).await?,
            3 | 4 => self.reserve(quantity, buyer).await?,
            5 => self.settle(HoldState::Confirmed).await?,
            6 => self.settle(HoldState::Cancelled).await?,
            7 | 8 => self.refund(quantity).await?,
            9 => self.restock(quantity).await?,
            10 => self.resolve().await?,
            _ if self.random.random_ratio(1, 4) => self.burst().await?,
            _ => {
                let segments = segments(&mut self.random);
                self.sale.resize(segments).await.map_err(|error| error.to_string())?;
            }
        }
        self.counts().await
    }

    async fn deduct(&mut self, quantity: u64, buyer: String) -> Verdict {
        let id = self.id("d");
        let result = self.sale.deduct(quantity).operation(&id).buyer(&buyer).send().await;
        match self.model.operations.get(&id) {
            Some(Operation { what: What::Tombstone, .. }) => {
                return agree("deduct", result.ok(), Some(Deduction::Refused));
            }
            Some(known) if known.quantity == quantity && known.whose.as_ref() == Some(&buyer) => {
                let again = match result {
                    Ok(Deduction::Taken(receipt)) => ("taken", Some(receipt)),
                    Ok(Deduction::Refunded(receipt)) => ("refunded", Some(receipt)),
                    other => return Err(format!("deduct again: {other:?}")),
                };
                return agree("deduct again", again, (known.answer(), known.receipt()));
            }
            Some(_) => return agree("deduct", is_conflict(&result), true),
            None => {}
        }
        match (self.model.refusal(quantity, &buyer), result) {
            ("limit", Ok(Deduction::LimitReached)) => Ok(()),
            ("sold out", Ok(Deduction::SoldOut { reserved, .. })) => {
                agree("only reserved", reserved, self.model.reserved())
            }
            ("not enough", Ok(Deduction::NotEnough { available, reserved, .. })) => {
                let is = (self.model.available(), self.model.reserved());
                agree("what is left", (available, reserved), is)
            }
            ("", Ok(Deduction::Taken(receipt))) => {
                self.keep(id, What::Deduction, quantity, Some(buyer), Some(receipt))
            }
            (refusal, result) => Err(format!("deduct should be `{refusal}`: {result:?}")),
        }
    }

    /// Many deductions at the same time: each one that finds units gets them.
    async fn burst(&mut self) -> Verdict {
        let many = self.random.random_range(2..300);
        let number: u32 = self.random.random();
        let mut buying = tokio::task::JoinSet::new();
        for at in 0..many {
            let sale = self.sale.clone();
            buying.spawn(async move {
                let (id, buyer) = (format!("b{number}-{at}"), format!("burst-{number}-{at}"));
                let bought = sale.deduct(1).operation(&id).buyer(&buyer).send().await;
                (id, buyer, bought)
            });
        }
        let expected = self.model.available().min(many);
        let mut served = 0;
        while let Some(bought) = buying.join_next().await {
            match bought.expect("no panic") {
                (id, buyer, Ok(Deduction::Taken(receipt))) => {
                    served += 1;
                    self.keep(id, What::Deduction, 1, Some(buyer), Some(receipt))?;
                }
                (_, _, Ok(Deduction::SoldOut { .. })) => {}
                (id, _, other) => return Err(format!("{id}: {other:?}")),
            }
        }
        agree("served of a burst", served, expected)
    }

    async fn reserve(&mut self, quantity: u64, buyer: String) -> Verdict {
        let id = self.id("r");
        let is_short = self.random.random_bool(0.3);
        let lasts = Duration::from_millis(if is_short { 1 } else { 3_600_000 });
        let reserve = self.sale.reserve(quantity).operation(&id).buyer(&buyer).expires_in(lasts);
        let result = reserve.send().await;
        match self.model.operations.get(&id) {
            Some(Operation { what: What::Tombstone, .. }) => {
                return agree("reserve", result.ok(), Some(Reservation::Refused));
            }
            Some(known)
                if matches!(known.what, What::Reservation(_))
                    && known.quantity == quantity
                    && known.whose.as_ref() == Some(&buyer) =>
            {
                let again = match result {
                    Ok(Reservation::Held(hold)) => ("open", hold.receipt),
                    Ok(Reservation::Confirmed(receipt)) => ("confirmed", receipt),
                    Ok(Reservation::Refunded(receipt)) => ("refunded", receipt),
                    Ok(Reservation::Expired(hold)) => ("expired", hold.receipt),
                    Ok(Reservation::Cancelled(hold)) => ("cancelled", hold.receipt),
                    other => return Err(format!("reserve again: {other:?}")),
                };
                let (answer, receipt) = again;
                let should_be = (known.answer(), known.receipt());
                return agree("reserve again", (answer, Some(receipt)), should_be);
            }
            Some(_) => return agree("reserve", is_conflict(&result), true),
            None => {}
        }
        match (self.model.refusal(quantity, &buyer), result) {
            ("limit", Ok(Reservation::LimitReached))
            | ("sold out", Ok(Reservation::SoldOut { .. }))
            | ("not enough", Ok(Reservation::NotEnough { .. })) => Ok(()),
            ("", Ok(Reservation::Held(hold))) => {
                let state = if is_short {
                    tokio::time::sleep(Duration::from_millis(4)).await;
                    HoldState::Expired
                } else {
                    HoldState::Open
                };
                self.keep(id, What::Reservation(state), quantity, Some(buyer), Some(hold.receipt))
            }
            (refusal, result) => Err(format!("reserve should be `{refusal}`: {result:?}")),
        }
    }

    fn keep(
        &mut self,
        id: String,
        what: What,
        quantity: u64,
        whose: Option<String>,
        receipt: Option<Receipt>,
    ) -> Verdict {
        if let Some(receipt) = &receipt {
            agree("the receipt's units", (receipt.quantity, receipt.left), (quantity, quantity))?;
        }
        let operation = Operation { what, quantity, refunded: 0, whose, receipt };
        self.model.operations.insert(id, operation);
        Ok(())
    }

    async fn settle(&mut self, how: HoldState) -> Verdict {
        let id = self.id("r");
        let reservation = self.sale.reservation(&id);
        let result = match how {
            HoldState::Confirmed => match reservation.confirm().await {
                Err(error @ Error::NotFound(_)) => Err(error),
                known => Ok(common::state_of(known)),
            },
            _ => reservation.cancel().await,
        };
        match self.model.operations.get_mut(&id) {
            None if how == HoldState::Confirmed => {
                agree("confirm", matches!(result, Err(Error::NotFound(_))), true)
            }
            None => {
                agree("cancel before reserve", result.ok(), Some(HoldState::Refused))?;
                self.keep(id, What::Tombstone, 0, None, None)
            }
            Some(known) => match &mut known.what {
                What::Reservation(state) => {
                    if *state == HoldState::Open {
                        *state = how;
                    }
                    agree("settle", result.ok(), Some(known.state()))
                }
                _ => agree("settle", result.ok(), Some(HoldState::Refused)),
            },
        }
    }

    async fn refund(&mut self, quantity: u64) -> Verdict {
        let kind = if self.random.random() { "d" } else { "r" };
        let (of, id) = (self.id(kind), self.id("f"));
        let result = self.sale.refund(&of).quantity(quantity).operation(&id).send().await;
        if let Some(known) = self.model.operations.get(&id) {
            return match known.what {
                What::Tombstone => agree("refund", result.ok(), Some(Refund::Refused)),
                _ if known.quantity == quantity && known.whose.as_ref() == Some(&of) => {
                    agree("refund again", result.ok(), known.receipt.clone().map(Refund::Refunded))
                }
                _ => agree("refund", is_conflict(&result), true),
            };
        }
        let Some(target) = self.model.operations.get_mut(&of) else {
            return agree("refund", matches!(result, Err(Error::NotFound(_))), true);
        };
        if target.what == What::Reservation(HoldState::Open) {
            return agree("refund of a reservation", is_conflict(&result), true);
        }
        let left = target.sold();
        if quantity > left {
            return agree("refund", result.ok(), Some(Refund::TooMuch { left }));
        }
        let Ok(Refund::Refunded(receipt)) = result else {
            return Err(format!("refund: {result:?}"));
        };
        target.refunded += quantity;
        self.keep(id, What::Refund, quantity, Some(of), Some(receipt))
    }

    async fn restock(&mut self, quantity: u64) -> Verdict {
        let id = self.id("s");
        let result = self.sale.restock(quantity).operation(&id).send().await;
        match self.model.operations.get(&id) {
            Some(known) if known.what == What::Restock && known.quantity == quantity => {
                agree("restock again", result.ok(), known.receipt.clone())
            }
            Some(_) => agree("restock", is_conflict(&result), true),
            None => {
                let receipt = result.map_err(|error| error.to_string())?;
                self.model.supplied += quantity;
                self.keep(id, What::Restock, quantity, None, Some(receipt))
            }
        }
    }

    async fn resolve(&mut self) -> Verdict {
        let kind = ["d", "r", "f", "s"][self.random.random_range(0..4)];
        let id = self.id(kind);
        let result = self.sale.resolve(&id).await.map_err(|error| error.to_string())?;
        let Some(known) = self.model.operations.get(&id) else {
            agree("resolve", result, Resolved::NotApplied)?;
            return self.keep(id, What::Tombstone, 0, None, None);
        };
        let resolved = match result {
            Resolved::Taken(receipt) => ("taken", Some(receipt)),
            Resolved::Held(hold) => ("open", Some(hold.receipt)),
            Resolved::Confirmed(receipt) => ("confirmed", Some(receipt)),
            Resolved::Refunded(receipt) => ("refunded", Some(receipt)),
            Resolved::Expired(hold) => ("expired", Some(hold.receipt)),
            Resolved::Cancelled(hold) => ("cancelled", Some(hold.receipt)),
            Resolved::RefundDone(receipt) => ("refund", Some(receipt)),
            Resolved::Restocked(receipt) => ("restock", Some(receipt)),
            _ => ("refused", None),
        };
        agree("resolve", resolved, (known.answer(), known.receipt()))
    }

    async fn counts(&mut self) -> Verdict {
        let stock = self.sale.stock().await.map_err(|error| error.to_string())?;
        let is = (stock.available, stock.reserved, stock.sold);
        let (available, reserved, sold) =
            (self.model.available(), self.model.reserved(), self.model.sold());
        agree("the counts", is, (available, reserved, sold))?;
        let sum = available + reserved + sold;
        agree("I2", stock.initial + stock.restocked, sum)
    }
}

fn word(state: HoldState) -> &'static str {
    match state {
        HoldState::Open => "open",
        HoldState::Confirmed => "confirmed",
        HoldState::Refunded => "refunded",
        HoldState::Cancelled => "cancelled",
        HoldState::Expired => "expired",
        _ => "refused",
    }
}

fn is_conflict<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Conflict(_)))
}

async fn walk(place: &Place, seed: u64, steps: usize) -> Verdict {
    let mut walk = Walk::new(place, seed).await;
    for step in 0..steps {
        walk.step().await.map_err(|what| format!("seed {seed}, step {step}: {what}"))?;
    }
    let audit = walk.sale.audit().await.map_err(|error| error.to_string())?;
    agree("the audit", (audit.is_clean(), &audit.disagreements), (true, [(); 0]))
}

fn seeds(by_default: u64) -> u64 {
    std::env::var("DLOCK_TEST_SEEDS").ok().and_then(|it| it.parse().ok()).unwrap_or(by_default)
}

on_both_stores!(random_operations);

async fn random_operations(place: Place) {
    for seed in 0..seeds(25) {
        walk(&place, seed, 120).await.expect("the model and the sale agree");
    }
}

fn planted(bug: Bug) -> Place {
    let place = Place::memory().expect("it is embedded");
    Memory::new(place.dlock.client_extension()).expect("embedded").plant(bug);
    place
}

#[tokio::test]
async fn planted_bugs_are_found() {
    for bug in Bug::ALL.into_iter().filter(|bug| *bug != Bug::ReadThenWrite) {
        let place = planted(bug);
        let mut found = None;
        for seed in 0..200 {
            if let Err(what) = walk(&place, seed, 120).await {
                found = Some(what);
                break;
            }
        }
        println!("{bug:?}: {}", found.as_deref().unwrap_or("not found"));
        assert!(found.is_some(), "{bug:?} was not found");
    }
}

/// This bug only shows between threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_count_read_then_written_is_found() {
    let oversold = |place: Place| async move {
        for round in 0..300 {
            let sale = Inventory::builder(&place.dlock, format!("race-{round}")).stock(3);
            let sale = sale.sold_out_for(Duration::ZERO).create().await.expect("a sale");
            let buying = (0..8).map(|_| {
                let sale = sale.clone();
                tokio::spawn(async move {
                    matches!(sale.deduct(1).send().await, Ok(Deduction::Taken(_)))
                })
            });
            let mut sold = 0;
            for buying in buying.collect::<Vec<_>>() {
                sold += u32::from(buying.await.expect("no panic"));
            }
            let is_clean = sale.audit().await.expect("an audit").is_clean();
            assert_eq!(is_clean, sold == 3, "the audit sees it too");
            if sold != 3 {
                return true;
            }
        }
        false
    };
    assert!(oversold(planted(Bug::ReadThenWrite)).await, "the bug was not found");
    assert!(!oversold(Place::memory().expect("it is embedded")).await);
}
