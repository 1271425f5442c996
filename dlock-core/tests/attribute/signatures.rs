//! Every shape of function, on the embedded backend: what they compile to does not
//! depend on the backend.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use dlock::{Dlock, Error, Guard, Result, assert_locked, distributed_lock, testing};

fn assert_send<T: Send>(future: T) -> T {
    future
}

// -- methods -----------------------------------------------------------------

struct Shop {
    tenant: String,
    dlock: Dlock,
    sold: u32,
}

struct Request {
    user: User,
}

struct User {
    id: u64,
}

impl Shop {
    fn new() -> Self {
        Shop { tenant: "acme".into(), dlock: testing::client(), sold: 0 }
    }

    #[distributed_lock(key = "tenant:{self.tenant}:user:{req.user.id}", client = self.dlock, guard = lock)]
    async fn by_reference(&self, req: Request) -> Result<String> {
        let _moved = req; // the key was made before the body could move anything
        Ok(lock.key().as_str().to_owned())
    }

    #[distributed_lock(key = "tenant:{self.tenant}", client = self.dlock)]
    async fn by_mutable_reference(&mut self, count: u32) -> Result<&u32> {
        self.sold += count;
        Ok(&self.sold)
    }

    #[distributed_lock(key = "tenant:{self.tenant}", client = self.dlock)]
    async fn by_value(self) -> Result<Shop> {
        Ok(self)
    }

    #[distributed_lock(key = "tenant:{self.tenant}", client = self.dlock)]
    async fn by_mutable_value(mut self) -> Result<u32> {
        self.sold += 1;
        Ok(self.sold)
    }

    #[distributed_lock(key = "tenant:{self.tenant}", client = self.dlock)]
    async fn by_arc(self: Arc<Self>) -> Result<usize> {
        Ok(Arc::strong_count(&self))
    }

    #[distributed_lock(key = "tenant:{self.tenant}", client = self.dlock)]
    async fn by_box(self: Box<Self>) -> Result<String> {
        Ok(self.tenant)
    }

    #[distributed_lock(key = "tenant:{self.tenant}", client = self.dlock)]
    async fn by_pin(self: Pin<&mut Self>) -> Result<usize> {
        Ok(self.tenant.len())
    }

    #[distributed_lock(key = "new:{tenant}", client = dlock)]
    async fn associated(dlock: &Dlock, tenant: String) -> Result<Self> {
        Ok(Self { tenant, dlock: dlock.clone(), sold: 0 })
    }
}

#[tokio::test]
async fn methods() {
    let mut shop = Shop::new();
    let request = Request { user: User { id: 7 } };
    assert_eq!(
        assert_send(shop.by_reference(request)).await.unwrap(),
        "tenant:acme:user:7",
        "fields of fields"
    );
    assert_eq!(*assert_send(shop.by_mutable_reference(2)).await.unwrap(), 2);
    let shop = assert_send(shop.by_value()).await.unwrap();
    assert_eq!(assert_send(shop.by_mutable_value()).await.unwrap(), 3);
    assert_eq!(assert_send(Arc::new(Shop::new()).by_arc()).await.unwrap(), 1);
    assert_eq!(assert_send(Box::new(Shop::new()).by_box()).await.unwrap(), "acme");
    let mut shop = Box::pin(Shop::new());
    assert_eq!(assert_send(shop.as_mut().by_pin()).await.unwrap(), 4);
    let other = Shop::associated(&shop.dlock, "b".into()).await.unwrap();
    assert_eq!(other.tenant, "b");
}

// -- traits ------------------------------------------------------------------

trait Store {
    fn dlock(&self) -> &Dlock;

    async fn put(&mut self, id: u64) -> Result<u64>;

    #[distributed_lock(key = "store:{id}", client = self.dlock())]
    async fn provided(&self, id: u64) -> Result<u64> {
        Ok(id)
    }
}

impl Store for Shop {
    fn dlock(&self) -> &Dlock {
        &self.dlock
    }

    #[distributed_lock(key = "store:{id}", client = self.dlock)]
    async fn put(&mut self, id: u64) -> Result<u64> {
        self.sold += 1;
        Ok(id)
    }
}

#[tokio::test]
async fn traits() {
    let mut shop = Shop::new();
    assert_eq!(shop.put(7).await.unwrap(), 7);
    assert_eq!(shop.provided(8).await.unwrap(), 8);
}

// -- generics ----------------------------------------------------------------

#[distributed_lock(key = "g:{id}:{N}", client = dlock)]
async fn generic<'a, T, const N: usize>(dlock: &Dlock, id: T, rest: &'a [T; N]) -> Result<&'a T>
where
    T: Display + Send + Sync,
{
    rest.first().ok_or_else(|| unreachable!("{id}"))
}

#[distributed_lock(key = "g:{id}", client = dlock)]
async fn impl_arguments(
    dlock: &Dlock,
    id: impl Display,
    make: impl FnOnce() -> u32,
) -> Result<u32> {
    let _ = id;
    Ok(make())
}

#[distributed_lock(key = "g:{first}:{second}", client = dlock)]
async fn lifetimes<'a>(dlock: &Dlock, first: &'a str, second: &str) -> Result<Cow<'a, str>> {
    Ok(if second.is_empty() { first.into() } else { format!("{first}{second}").into() })
}

#[tokio::test]
async fn generics() {
    let dlock = testing::client();
    assert_eq!(*assert_send(generic(&dlock, "x", &["a", "b"])).await.unwrap(), "a");
    assert_eq!(assert_send(impl_arguments(&dlock, 7, || 8)).await.unwrap(), 8);
    assert_eq!(assert_send(lifetimes(&dlock, "a", "b")).await.unwrap(), "ab");
}

// -- arguments ---------------------------------------------------------------

struct Path<T>(T);
struct Query {
    page: u32,
    size: u32,
}

#[distributed_lock(key = "p:{id}:{page}:{n}:{a}:{b}:{whole:?}", client = dlock)]
async fn destructured(
    dlock: &Dlock,
    Path(id): Path<u64>,
    Query { page, size: n }: Query,
    (a, [b, ..]): (u8, [u8; 2]),
    whole @ 0..: u32,
    _: (),
) -> Result<u64> {
    Ok(id + u64::from(page + n + whole) + u64::from(a + b))
}

#[distributed_lock(key = "m:{count}", client = dlock)]
async fn mutable(dlock: &Dlock, mut count: u32, mut log: Vec<u32>) -> Result<Vec<u32>> {
    while count > 0 {
        count -= 1;
        log.push(count);
    }
    Ok(log)
}

const REGION: &str = "eu";

#[distributed_lock(key = "r:{REGION}:{r#type}:{größe:03}", client = dlock, guard = lock)]
async fn names(dlock: &Dlock, r#type: &str, größe: u32) -> Result<String> {
    Ok(format!("{} {type} {größe}", lock.key().as_str()))
}

#[tokio::test]
async fn arguments() {
    let dlock = testing::client();
    let sum = destructured(&dlock, Path(1), Query { page: 2, size: 3 }, (4, [5, 0]), 6, ());
    assert_eq!(assert_send(sum).await.unwrap(), 21);
    assert_eq!(mutable(&dlock, 2, vec![]).await.unwrap(), [1, 0]);
    assert_eq!(names(&dlock, "x", 7).await.unwrap(), "r:eu:x:007 x 7");
}

// -- return types ----------------------------------------------------------------

type Alias<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[distributed_lock(key = "k", client = dlock)]
async fn not_send_value(dlock: &Dlock) -> Alias<u32> {
    tokio::task::yield_now().await;
    let number: u32 = "7".parse()?;
    Ok(number)
}

#[distributed_lock(key = "k", client = dlock)]
async fn hidden(dlock: &Dlock) -> Result<impl Display + use<>> {
    if false {
        Err(Error::new(dlock::ErrorKind::Invalid, dlock::Operation::Hold))?;
    }
    Ok(7)
}

#[distributed_lock(key = "k", client = dlock, on_error = |_| String::new())]
async fn hidden_whole(dlock: &Dlock) -> impl Display + use<> {
    String::from("x")
}

#[distributed_lock(key = "k", client = dlock, on_error = |_| None)]
async fn option(dlock: &Dlock, parse: &str) -> Option<u32> {
    let number: u32 = parse.parse().ok()?;
    Some(number)
}

#[distributed_lock(key = "k", client = dlock, on_error = |error| panic!("{error}"))]
async fn implicit_unit(dlock: &Dlock, early: bool) {
    if early {
        return;
    }
    assert_locked!("k");
}

#[tokio::test]
async fn return_types() {
    let dlock = testing::client();
    assert_eq!(assert_send(not_send_value(&dlock)).await.unwrap(), 7);
    assert_eq!(assert_send(hidden(&dlock)).await.unwrap().to_string(), "7");
    assert_eq!(assert_send(hidden_whole(&dlock)).await.to_string(), "x");
    assert_eq!(option(&dlock, "7").await, Some(7));
    assert_eq!(option(&dlock, "x").await, None);
    assert_send(implicit_unit(&dlock, true)).await;
    implicit_unit(&dlock, false).await;
}

// -- Send and what is not ---------------------------------------------------------

#[distributed_lock(key = "k:{counted.name}", client = dlock)]
async fn not_sync_argument(dlock: &Dlock, counted: Counted) -> Result<u32> {
    tokio::task::yield_now().await;
    Ok(counted.cell.get())
}

/// Send, and not Sync.
struct Counted {
    name: &'static str,
    cell: Cell<u32>,
}

#[distributed_lock(key = "k", client = dlock)]
async fn not_send_body(dlock: &Dlock, shared: Rc<RefCell<u32>>) -> Result<Rc<RefCell<u32>>> {
    tokio::task::yield_now().await;
    *shared.borrow_mut() += 1;
    Ok(shared)
}

#[tokio::test]
async fn send_as_the_body_is() {
    let dlock = testing::client();
    let counted = Counted { name: "x", cell: Cell::new(7) };
    assert_eq!(assert_send(not_sync_argument(&dlock, counted)).await.unwrap(), 7);
    let shared = not_send_body(&dlock, Rc::default()).await.unwrap();
    assert_eq!(*shared.borrow(), 1);
}

// -- attributes, docs and visibility are kept -----------------------------------------

mod inner {
    use super::*;

    /// Documented.
    #[deprecated = "kept"]
    #[must_use = "kept too"]
    #[distributed_lock(key = "k", client = dlock)]
    #[allow(unused_variables, clippy::needless_pass_by_value)]
    pub(super) async fn decorated(dlock: Dlock, unused: u32) -> Result<()> {
        #![allow(unused_mut)]
        let mut also_unused = 1;
        Ok(())
    }

    #[cfg(any())]
    #[distributed_lock(key = "k")]
    async fn not_compiled() -> Missing {}
}

#[tokio::test]
async fn decorations() {
    #[expect(deprecated, reason = "that it is kept is what is tried here")]
    inner::decorated(testing::client(), 1).await.unwrap();
}

/// Two attributes are two locks, the upper one outside.
#[distributed_lock(key = "a", client = dlock)]
#[distributed_lock(key = "b", client = dlock)]
async fn stacked(dlock: &Dlock) -> Result<usize> {
    assert_locked!("a");
    assert_locked!("b");
    Ok(dlock.local_state().held.len())
}

macro_rules! annotated {
    ($name:ident, $key:literal, $ttl:expr) => {
        #[distributed_lock(key = $key, ttl = $ttl, client = dlock, guard = lock)]
        async fn $name(dlock: &Dlock) -> Result<String> {
            let lock: &Guard = lock;
            Ok(lock.key().as_str().to_owned())
        }
    };
}
annotated!(by_macro, "from:macro", "3s");

/// The body comes from a fragment, so that it is in a group without delimiters.
macro_rules! annotated_block {
    ($name:ident, $body:block) => {
        #[distributed_lock(key = "block:{id}", client = dlock)]
        async fn $name(dlock: &Dlock, id: u32) -> Result<u32> $body
    };
}
annotated_block!(by_block, { Ok(1) });

#[distributed_lock(key = "h", client = dlock)]
async fn hygienic(dlock: &Dlock, held: u32, error: u32, lock: u32, value: u32) -> Result<u32> {
    let client = 1;
    Ok(held + error + lock + value + client)
}

#[tokio::test]
async fn expansions_do_not_meet() {
    let dlock = testing::client();
    assert_eq!(stacked(&dlock).await.unwrap(), 2);
    assert_eq!(by_macro(&dlock).await.unwrap(), "from:macro");
    assert_eq!(by_block(&dlock, 7).await.unwrap(), 1);
    assert_eq!(hygienic(&dlock, 1, 2, 3, 4).await.unwrap(), 11);
}

// -- as large and as costly as by hand ---------------------------------------------

#[distributed_lock(key = "order:{id}", client = dlock)]
async fn annotated(dlock: &Dlock, id: u64, work: [u8; 2_000]) -> Result<u64> {
    tokio::task::yield_now().await;
    Ok(id + u64::from(work[7]))
}

async fn by_hand(dlock: &Dlock, id: u64, work: [u8; 2_000]) -> Result<u64> {
    let guard = dlock.mutex(dlock::key!("order:{id}")).lock().await?;
    let run = guard.run(async move {
        tokio::task::yield_now().await;
        Ok(id + u64::from(work[7]))
    });
    run.await?
}

/// The fewest of some rounds: now and then something grows that is kept for later.
fn allocations<F: Future>(runtime: &tokio::runtime::Runtime, call: impl Fn() -> F) -> u64 {
    let round = || {
        let counted = allocation_counter::measure(|| {
            runtime.block_on(call());
        });
        counted.count_total
    };
    (0..20).map(|_| round()).min().unwrap_or_default()
}

#[test]
fn no_larger_and_no_more_allocations_than_by_hand() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let dlock = runtime.block_on(async { testing::client() });
    let (this, that) = (annotated(&dlock, 7, [0; 2_000]), by_hand(&dlock, 7, [0; 2_000]));
    let (size, size_by_hand) = (size_of_val(&this), size_of_val(&that));
    assert!(size <= size_by_hand + 32, "{size} and {size_by_hand} by hand");
    drop((this, that));
    let guard = runtime.block_on(dlock.mutex("size").lock()).expect("the lock");
    let work = async {
        let kept = [0_u8; 2_000];
        tokio::task::yield_now().await;
        kept[7]
    };
    let alone = size_of_val(&work);
    let run = size_of_val(&guard.run(work));
    assert!(run <= alone + 300, "{run}: a future of {alone} is stored once");
    let this = allocations(&runtime, || annotated(&dlock, 7, [0; 2_000]));
    let that = allocations(&runtime, || by_hand(&dlock, 7, [0; 2_000]));
    assert_eq!(this, that);
}
