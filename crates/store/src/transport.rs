//! The way of `object_store`'s requests to the network: zebu's own client for HTTP.

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::BodyExt;
use object_store::client::{
    ClientConfigKey, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientOptions, client};
use std::sync::Arc;
use std::time::Duration;
use zebu_remote::http::{ClientErrorKind, HttpClient, HttpOptions};

/// How long connecting to the metadata service of an instance may take: elsewhere, nobody is there.
const METADATA_PATIENCE: Duration = Duration::from_secs(1);

/// Makes clients with the options for web servers.
#[derive(Debug, Clone)]
pub(crate) struct Connector(pub(crate) HttpOptions);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<client::HttpClient> {
        let is_on = |key| options.get_config_value(&key).is_some_and(|value| value == "true");
        let allows_plain = is_on(ClientConfigKey::AllowHttp);
        let mut own = self.0.clone();
        if options.get_config_value(&ClientConfigKey::ConnectTimeout).as_deref() == Some("1 second") {
            own = own.connect_timeout(METADATA_PATIENCE);
        }
        Ok(client::HttpClient::new(Service { client: Arc::new(HttpClient::new(own)), allows_plain }))
    }
}

#[derive(Debug)]
struct Service {
    client: Arc<HttpClient>,
    /// Whether requests may go without TLS.
    allows_plain: bool,
}

/// A failure in words that can be shown.
#[derive(Debug)]
struct Told(String);

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Told {}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let told = |kind, reason: &str| HttpError::new(kind, Told(reason.to_owned()));
        let (parts, mut body) = request.into_parts();
        if !self.allows_plain && parts.uri.scheme_str() != Some("https") {
            return Err(told(HttpErrorKind::Decode, "a request without TLS: the endpoint must be https"));
        }
        let mut pieces: Vec<Bytes> = Vec::new();
        while let Some(frame) = body.frame().await {
            pieces.extend(frame?.into_data().ok());
        }
        let client = Arc::clone(&self.client);
        let exchange = move || {
            let pieces: Vec<&[u8]> = pieces.iter().map(|piece| &**piece).collect();
            client.exchange(http::Request::from_parts(parts, ()), &pieces)
        };
        let answer = tokio::task::spawn_blocking(exchange)
            .await
            .map_err(|_| told(HttpErrorKind::Unknown, "the request's thread ended"))?
            .map_err(|error| {
                let kind = match error.kind {
                    ClientErrorKind::Connecting => HttpErrorKind::Connect,
                    ClientErrorKind::Late => HttpErrorKind::Timeout,
                    ClientErrorKind::Broken => HttpErrorKind::Interrupted,
                    _ => HttpErrorKind::Decode,
                };
                told(kind, &error.reason)
            })?;
        if answer.status().is_redirection()
            && let Some(region) =
                answer.headers().get("x-amz-bucket-region").and_then(|value| value.to_str().ok())
        {
            let reason = format!("the bucket is in another region: AWS_REGION={region} names it");
            return Err(told(HttpErrorKind::Decode, &reason));
        }
        Ok(answer.map(Into::into))
    }
}
