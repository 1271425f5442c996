//! The attribute combined with other attributes, above and below it.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use dlock::{Dlock, Error, Result, assert_locked, distributed_lock, testing};

// -- tracing -------------------------------------------------------------------

#[tracing::instrument(skip(dlock))]
#[distributed_lock(key = "order:{id}", client = dlock)]
async fn instrumented_outside(dlock: &Dlock, id: u64) -> Result<u64> {
    assert_locked!("order:{id}");
    tracing::info!("inside");
    Ok(id)
}

#[distributed_lock(key = "order:{id}", client = dlock)]
#[tracing::instrument(skip(dlock), err)]
async fn instrumented_inside(dlock: &Dlock, id: u64) -> Result<u64> {
    assert_locked!("order:{id}");
    tracing::info!("inside");
    Ok(id)
}

/// The spans that an event was in.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<String>>>);

impl<S> tracing_subscriber::Layer<S> for Seen
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    fn on_event(
        &self,
        event: &tracing::Event<'_>,
        context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        if event.metadata().target().starts_with("dlock") {
            return;
        }
        let names = context.event_scope(event).into_iter().flatten().map(|span| span.name());
        self.0.lock().unwrap().extend(names.map(str::to_owned));
    }
}

#[tokio::test]
async fn with_instrument() {
    use tracing_subscriber::layer::SubscriberExt as _;

    let seen = Seen::default();
    let subscriber = tracing_subscriber::registry().with(seen.clone());
    let _default = tracing::subscriber::set_default(subscriber);
    let dlock = testing::client();
    instrumented_outside(&dlock, 7).await.unwrap();
    instrumented_inside(&dlock, 7).await.unwrap();
    assert_eq!(*seen.0.lock().unwrap(), ["instrumented_outside", "instrumented_inside"]);
}

/// The output of `#[async_trait]` looks similar; here all of it is the body.
#[distributed_lock(key = "by-hand", client = dlock)]
fn boxed_by_hand(dlock: &Dlock) -> Pin<Box<dyn Future<Output = Result<usize>> + Send + '_>> {
    Box::pin(async move {
        let holders = dlock.inspect("by-hand").await?.holders;
        let count: usize = holders.len();
        Ok(count)
    })
}

#[tokio::test]
async fn all_of_a_boxed_body_is_under_the_lock() {
    assert_eq!(boxed_by_hand(&testing::client()).await.unwrap(), 1);
}

// -- async_trait -----------------------------------------------------------------

struct Path<T>(T);

#[async_trait::async_trait]
trait Service: Send + Sync {
    async fn update(&self, id: u64, note: String) -> Result<String>;
    async fn change(&mut self, path: Path<u64>) -> Result<u32>;
    async fn consume(self: Arc<Self>, id: u64) -> Result<u64>;
    async fn nothing(&self);

    fn client(&self) -> &Dlock;

    #[distributed_lock(key = "tenant:{id}", client = self.client())]
    async fn provided(&self, id: u64) -> Result<u64> {
        assert_locked!("tenant:{id}");
        Ok(id)
    }
}

struct App {
    tenant: String,
    dlock: Dlock,
    count: u32,
}

#[async_trait::async_trait]
impl Service for App {
    #[distributed_lock(key = "tenant:{self.tenant}:{id:03}", client = self.dlock, guard = lock)]
    async fn update(&self, id: u64, note: String) -> Result<String> {
        if note.is_empty() {
            return Ok(String::new());
        }
        let found: Result<String> = Ok(format!("{} {note}", lock.key().as_str()));
        let found = found?;
        tokio::task::yield_now().await;
        Ok(found)
    }

    #[distributed_lock(key = "tenant:{self.tenant}:{id}", client = self.dlock)]
    async fn change(&mut self, Path(id): Path<u64>) -> Result<u32> {
        let tenant = &self.tenant;
        assert_locked!("tenant:{tenant}:{id}");
        self.count += 1;
        Ok(self.count)
    }

    #[distributed_lock(key = "tenant:{self.tenant}", client = self.dlock)]
    async fn consume(self: Arc<Self>, id: u64) -> Result<u64> {
        let tenant = &self.tenant;
        assert_locked!("tenant:{tenant}");
        Ok(id)
    }

    #[distributed_lock(key = "tenant:{self.tenant}", client = self.dlock, on_error = |error| panic!("{error} {}", self.tenant))]
    async fn nothing(&self) {
        assert_locked!("tenant:{self.tenant}");
    }

    fn client(&self) -> &Dlock {
        &self.dlock
    }
}

#[async_trait::async_trait(?Send)]
trait Local {
    async fn run(&self, shared: std::rc::Rc<u32>) -> Result<u32>;
}

#[async_trait::async_trait(?Send)]
impl Local for App {
    #[distributed_lock(key = "local:{shared}", client = self.dlock)]
    async fn run(&self, shared: std::rc::Rc<u32>) -> Result<u32> {
        Ok(*shared)
    }
}

#[tokio::test]
async fn with_async_trait() {
    let app = || App { tenant: "a".into(), dlock: testing::client(), count: 0 };
    let mut service: Box<dyn Service> = Box::new(app());
    assert_eq!(service.update(7, "x".into()).await.unwrap(), "tenant:a:007 x");
    assert_eq!(service.update(7, String::new()).await.unwrap(), "");
    assert_eq!(service.change(Path(7)).await.unwrap(), 1);
    assert_eq!(service.provided(7).await.unwrap(), 7);
    service.nothing().await;
    assert_eq!(Arc::new(app()).consume(8).await.unwrap(), 8);
    assert_eq!(app().run(std::rc::Rc::new(9)).await.unwrap(), 9);
}

// -- axum --------------------------------------------------------------------------

#[axum::debug_handler]
#[distributed_lock(key = "order:{id}")]
async fn handler_outside(axum::extract::Path(id): axum::extract::Path<u64>) -> Result<String> {
    Ok(id.to_string())
}

#[distributed_lock(key = "order:{id}", on_error = axum::response::IntoResponse::into_response)]
#[axum::debug_handler]
async fn handler_inside(
    axum::extract::Path(id): axum::extract::Path<u64>,
) -> axum::response::Response {
    axum::response::IntoResponse::into_response(id.to_string())
}

#[distributed_lock(key = "order:{id}", on_error = Err)]
#[axum::debug_handler]
async fn handler_hidden(
    axum::extract::Path(id): axum::extract::Path<u64>,
) -> impl axum::response::IntoResponse {
    Ok::<_, Error>(id.to_string())
}

#[test]
fn with_debug_handler() {
    use axum::routing::get;

    let _router: axum::Router = axum::Router::new()
        .route("/a/{id}", get(handler_outside))
        .route("/b/{id}", get(handler_inside))
        .route("/c/{id}", get(handler_hidden));
}

// -- tokio -------------------------------------------------------------------------

#[distributed_lock(key = "test", client = testing::client())]
#[tokio::test]
async fn above_a_test() -> Result<()> {
    assert_locked!("test");
    Ok(())
}
