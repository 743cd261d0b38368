"""From the paper's setting and predictors fitted on it to what the simulator runs on."""

import numpy as np

from controller.lab.simulator.cluster import ClusterDescription
from controller.lab.simulator.inputs import InputsError, SimulationInputs, pair_names
from controller.lab.training.fit_predictors import Embed, split_queries
from controller.lab.training.paper_setting import TIME_SIGMA, PaperSetting
from controller.predictors.features import profile_query
from controller.predictors.fitted import FittedPredictors


def simulation_inputs(
    setting: PaperSetting,
    fitted: FittedPredictors,
    embed: Embed,
    cluster: ClusterDescription,
    *,
    seed: int,
) -> SimulationInputs:
    """Predictions beside what is true, for all queries of the setting.

    Predicted classes, qualities, lengths and seconds are what the controller would have; answers
    and times are the setting's. Held out are the queries that the predictors did not see.

    Args:
        setting: of `paper_setting_from`.
        fitted: on this setting.
        embed: texts to float32[n, 384].
        cluster: whose placements must be among Table I's.
        seed: that the predictors were fitted with.

    Raises:
        InputsError: the cluster has a placement that the setting lacks.
    """
    names = pair_names(cluster)
    known = {f"{m.name}@{d.kind}": at for at, (m, d) in enumerate(setting.placements)}
    missing = sorted(set(names) - set(known))
    if missing:
        raise InputsError(
            f"the paper's setting has no {', '.join(missing[:3])}; simulate the scenario drlm, or "
            "measure this cluster"
        )
    columns = [known[name] for name in names]
    models = [model.name for model in cluster.configurations]
    order = [[model.name for model in setting.models].index(name) for name in models]
    prompts = setting.table.prompts
    queries = fitted.classifier.classify(
        [
            profile_query(text, embedding=row)
            for text, row in zip(prompts, embed(prompts), strict=True)
        ]
    )
    probabilities = np.stack(
        [query.class_probabilities for query in queries if query.class_probabilities is not None]
    )
    placed, devices = cluster.pairs
    pairs = [
        (cluster.configurations[m], cluster.devices[d])
        for m, d in zip(placed, devices, strict=True)
    ]
    true = setting.true_seconds[:, columns]
    return SimulationInputs(
        source=(
            f"DRLM's setting from public data, seed {seed}: real queries, published device speeds "
            "and some outcomes, the rest synthetic; predicted by predictors fitted on it"
        ),
        classes=fitted.classifier.classes,
        pairs=names,
        query_class=setting.table.class_index,
        class_probabilities=probabilities,
        prompt_tokens=np.array([float(query.prompt_tokens) for query in queries]),
        is_held_out=split_queries(len(prompts), seed),
        quality=fitted.quality.predict(probabilities, models),
        correct=setting.correct[:, order].astype(np.float64),
        answer_tokens=fitted.output_length.predict(probabilities, models),
        seconds=fitted.latency.predict(queries, fitted.latency.encode(pairs)),
        first_token_ratio=(setting.first_token_seconds[:, columns] / true).mean(axis=0),
        true_seconds=true,
        noise=TIME_SIGMA,
    )
